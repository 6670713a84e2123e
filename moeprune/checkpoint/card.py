"""The model card (README.md) of a pruned or a compressed checkpoint: `card.md.jinja`, filled from moeprune.json."""

import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moeprune.artifacts.files import read_json
from moeprune.checkpoint.rewrite import CARD
from moeprune.models.engine_limits import notes, parallel_sizes, serve_flags

# Front matter of the base model's card that stays true of the new model.
_INHERITED = ("license", "license_name", "license_link", "language", "pipeline_tag")
_LARGEST_SPLIT = 16  # devices; larger splits over experts are not listed


def pruned_card(record: Mapping[str, Any], source: Path, *, config: Mapping[str, Any], warnings: Sequence[str]) -> str:
    """README.md of a checkpoint with fewer experts; the card in `source`, if there is one, follows below a line.

    `config` is the pruned config.json.
    """
    layer = record["plan"]["layers"][0]
    kept = len(layer["kept"])
    domains = ((record.get("config") or {}).get("calibration") or {}).get("domains") or []
    return _filled(
        record,
        source,
        warnings,
        tags={"moe", "expert-pruning"},
        kept=kept,
        domains=[domain for domain in domains if "name" in domain and "path" in domain],
        serving=_serving(config, kept, top_k=layer["top_k"], chat_template=_chat_template(source)),
    )


def compressed_card(record: Mapping[str, Any], source: Path, *, packed: bool, warnings: Sequence[str]) -> str:
    """README.md of a checkpoint with compressed weights; the card in `source`, if there is one, follows below a line.

    `packed` says whether loading needs the compressed-tensors package.
    """
    tags = {"compressed"} | ({"moe", "expert-pruning"} if record.get("plan") else set())
    return _filled(record, source, warnings, tags=tags, dense=record["dense"][-1], packed=packed)


def _filled(record: Mapping[str, Any], source: Path, warnings: Sequence[str], *, tags: set[str], **values: Any) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    path, base = source / CARD, record["base_model"]
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    inherited, source_card = split_front_matter(text)
    environment = Environment(
        loader=PackageLoader("moeprune.checkpoint", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "method": method_text,
        "criterion": _criterion_text,
        "grouped": "{:,}".format,
        "a_line_a_layer": _plan_text,
        "yaml": _yaml,
    }
    return environment.get_template("card.md.jinja").render(
        {"dense": None, "plan": None}
        | values
        | {
            "record": {"plan": None} | dict(record),
            "front_matter": _front_matter(inherited, base["name"], base["revision"], tags),
            "base": base["name"],
            "name": base["name"].rpartition("/")[2],
            "warnings": warnings,
            "source_card": source_card.strip(),
        }
    )


def split_front_matter(text: str) -> tuple[dict[str, Any], str]:
    """(front matter, body) of a model card; front matter that is not YAML is left out."""
    from ruamel.yaml import YAML, YAMLError

    text = text.replace("\r\n", "\n")
    match = re.match(r"\A---\s*\n(.*?)\n---\s*(?:\n|\Z)", text, flags=re.DOTALL)
    if match is None:
        return {}, text
    try:
        front = YAML(typ="safe").load(match.group(1))
    except YAMLError:
        front = None
    return (front if isinstance(front, dict) else {}), text[match.end() :]


def _front_matter(source: Mapping[str, Any], name: str, revision: str | None, tags: set[str]) -> str:
    from huggingface_hub import ModelCardData

    return ModelCardData(
        library_name="transformers",
        base_model=name if "/" in name else None,  # the hub checks that a base model exists there
        base_model_revision=revision or None,
        tags=sorted(tags | {"moeprune"} | set(source.get("tags") or [])),
        **{key: source[key] for key in _INHERITED if key in source},
    ).to_yaml()


def _serving(config: Mapping[str, Any], kept: int, *, top_k: int, chat_template: str | None) -> dict[str, Any]:
    """What the card says of engines: commands, the numbers of devices that work, notes."""
    sizes = parallel_sizes(config, kept)
    commands = [" ".join(["vllm serve .", *serve_flags(config, chat_template)])]
    if sizes.tensor:
        devices = sizes.tensor[0]
        experts = " --enable-expert-parallel" if devices in sizes.expert else ""
        commands.append(f"{commands[0]} --tensor-parallel-size {devices}{experts}    # over {devices} devices")
    return {
        "commands": commands,
        "tensor": sizes.tensor,
        "expert": [size for size in sizes.expert if size <= _LARGEST_SPLIT],
        "notes": notes(config, [kept], top_k=top_k),
    }


def _chat_template(directory: Path) -> str | None:
    """The template's text, wherever the checkpoint keeps it; only to read which parsers it needs."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    path = directory / "tokenizer_config.json"
    template = read_json(path).get("chat_template") if path.is_file() else None
    if isinstance(template, list):  # several named ones
        return "\n".join(str(named.get("template", "")) for named in template)
    return template if isinstance(template, str) else None


def method_text(section: Mapping[str, Any]) -> str:
    """`name (option=value, ...)` of a dense method; options that are off are left out."""
    options = {key: value for key, value in section.items() if value is not None and value is not False}
    return _options_text({k: "+".join(map(str, v)) if isinstance(v, list) else v for k, v in options.items()})


def _criterion_text(section: Mapping[str, Any]) -> str:
    if section.get("name") == "portfolio":  # its options are whole criteria; the plan inside the checkpoint has them
        return f"portfolio of {', '.join(section.get('criteria', ()))}"
    return _options_text(section)


def _options_text(section: Mapping[str, Any]) -> str:
    options = ", ".join(f"{key}={value}" for key, value in section.items() if key != "name")
    return f"{section.get('name', '?')}" + (f" ({options})" if options else "")


def _plan_text(plan: Mapping[str, Any]) -> str:
    """JSON with a line for each layer: hundreds of kept ids are read, if at all, a layer at a time."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in plan.items() if key != "layers"]
    layers = ",\n  ".join(json.dumps(layer) for layer in plan["layers"])
    return "{\n" + "".join(f" {line},\n" for line in lines) + f' "layers": [\n  {layers}\n ]\n}}'


def _yaml(value: Any) -> str:
    from ruamel.yaml import YAML

    stream = io.StringIO()
    yaml = YAML(typ="safe")
    yaml.default_flow_style = False
    yaml.dump(value, stream)
    return stream.getvalue().rstrip()
