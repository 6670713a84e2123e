"""What a checkpoint says about itself: the model card (README.md) and the record (moeprune.json).

The part of a model card that says how to load, serve and upload the checkpoint.
"""

import hashlib
import io
import json
import re
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from moeprune.artifacts.plan import PrunePlan
from moeprune.artifacts.run import versions
from moeprune.checkpoint.inventory import Inventory
from moeprune.models.engine_limits import Note, notes, parallel_sizes, serve_flags
from moeprune.reference import MODEL_DIR


def serving_section(config: Mapping[str, Any], count: int, *, top_k: int, chat_template: str | None, name: str) -> str:
    """Markdown; `config` is the pruned config.json, `count` the experts of every layer, `name` what to call it."""
    sizes = parallel_sizes(config, count)
    flags = serve_flags(config, chat_template)
    parallel = [f"--tensor-parallel-size {sizes.tensor[0]}"] if sizes.tensor else []
    if sizes.tensor and sizes.tensor[0] in sizes.expert:
        parallel.append("--enable-expert-parallel")
    alone = " ".join(["vllm serve .", *flags])
    shared = " ".join([alone, *parallel])
    commands = f"{alone}\n{shared}    # over {sizes.tensor[0]} devices\n" if parallel else f"{alone}\n"
    return (
        "## Use\n\nThe layout is the base model's, so whatever serves that serves this:\n\n"
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained(".", dtype="auto", device_map="auto")\n'
        'tokenizer = AutoTokenizer.from_pretrained(".")\n```\n\n'
        f"```bash\n{commands}```\n\n"
        f"Tensor parallelism can split it over {_listed(sizes.tensor)} devices. "
        f"Expert parallelism can split {count} experts {_by(sizes.expert)}.\n\n"
        f"{_notes(notes(config, [count], top_k=top_k))}"
        "To check it in the engine you serve with, and to upload it:\n\n"
        f"```bash\nmoeprune verify . --engine vllm --python PATH/bin/python\nhf upload YOUR-NAME/{name} . .\n```\n"
    )


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes)) if sizes else "no power of two of"


def _by(sizes: Sequence[int]) -> str:
    small = [n for n in sizes if n <= 16]
    return f"by {', '.join(map(str, small))}" if small else "evenly by none of 2, 4, 8, 16"


def _notes(found: Sequence[Note]) -> str:
    return "".join(f"- {note}\n" for note in found) + "\n" if found else ""


RECORD_FORMAT = "moeprune.checkpoint/1"
PACKAGES = ("moeprune", "torch", "transformers", "safetensors", "numpy")
_HUB_CACHE = re.compile(r"models--(.+?)--(.+)")
# Front matter of the base model's card that stays true of the pruned model.
_INHERITED = ("license", "license_name", "license_link", "language", "pipeline_tag")


def base_model(directory: Path) -> tuple[str, str | None]:
    """(name, revision) of the checkpoint: the hub's for one in its cache, the package's own, or the directory's."""
    directory = Path(directory).absolute()
    if directory.resolve() == MODEL_DIR.resolve():
        return "moeprune-reference", None
    for parent in directory.parents:
        match = _HUB_CACHE.fullmatch(parent.name)
        if match is not None and directory.parent.name == "snapshots":
            return f"{match.group(1)}/{match.group(2)}", directory.name
    return directory.resolve().name, None


def record(
    source: Inventory,
    plan: PrunePlan,
    *,
    fingerprint: str,
    key: str,
    mtp: str,
    sizes: Mapping[str, int],
    hashes: Mapping[str, str],
    audit: Mapping[str, Any],
    provenance: Mapping[str, Any],
) -> dict[str, Any]:
    """moeprune.json: what this is, what it was made from and how; enough to make it again.

    `hashes` are sha256 of every file but the weights (of those, of the header: names, types, shapes); `provenance` is
    what the caller knows: the run's `config`, its `commit`.
    """
    name, revision = base_model(source.directory)
    earlier = source.directory / "moeprune.json"
    return {
        "format": RECORD_FORMAT,
        "key": key,
        "base_model": {
            "name": name,
            "revision": revision,
            "model_type": source.memory.model_type,
            "fingerprint": plan.model_fingerprint,
            "config_sha256": hashlib.sha256(source.config_text.encode()).hexdigest(),
            "moeprune": json.loads(earlier.read_text(encoding="utf-8")) if earlier.is_file() else None,
        },
        "fingerprint": fingerprint,
        "sizes": dict(sizes),
        "mtp": mtp,
        "plan": plan.model_dump(mode="json"),
        "config": provenance.get("config"),
        "commit": provenance.get("commit"),
        "versions": versions(PACKAGES),
        "hashes": dict(sorted(hashes.items())),
        "audit": dict(audit),
    }


def card(
    made: Mapping[str, Any],
    plan: PrunePlan,
    *,
    config: Mapping[str, Any],
    chat_template: str | None,
    warnings: tuple[str, ...],
    source_card: str | None,
) -> str:
    """README.md in Markdown with front matter; the base model's own card, if it has one, follows below a line.

    `config` is the pruned config.json.
    """
    front, body = split_front_matter(source_card or "")
    before, after = plan.layers[0].num_experts, len(plan.layers[0].kept)
    base = made["base_model"]["name"]
    link = f"[{base}](https://huggingface.co/{base})" if "/" in base else f"`{base}`"
    title = f"{base.rpartition('/')[2]}-{after}-experts"
    parts = [
        front_matter(front, base, made["base_model"]["revision"], tags={"moe", "expert-pruning"}),
        f"# {base.rpartition('/')[2]} with {after} of {before} experts\n",
        f"Made with `moeprune` from {link} by removing {before - after} of {before} experts from each of "
        f"{len(plan.layers)} MoE layers. Nothing was trained; every weight that is left has the bytes it had.\n",
        _facts(made, plan),
        _calibration(plan, made.get("config")),
        serving_section(config, after, top_k=plan.layers[0].top_k, chat_template=chat_template, name=title),
        _mtp(made["mtp"]),
        _warnings(warnings),
        _details("Plan", "json", _plan_text(made["plan"])),
        _details("Config of the run", "yaml", _yaml(made["config"])) if made.get("config") else "",
    ]
    if body.strip():
        parts.append(f"\n---\n\n## Model card of the base model\n\n{body.strip()}\n")
    return "\n".join(part for part in parts if part)


def split_front_matter(text: str) -> tuple[dict[str, Any], str]:
    """(front matter, body) of a model card; front matter that is not YAML is left out."""
    match = re.match(r"\A---\s*\n(.*?)\n---\s*(?:\n|\Z)", text.replace("\r\n", "\n"), flags=re.DOTALL)
    if match is None:
        return {}, text
    from ruamel.yaml import YAML, YAMLError

    try:
        front = YAML(typ="safe").load(match.group(1))
    except YAMLError:
        front = None
    return (front if isinstance(front, dict) else {}), text.replace("\r\n", "\n")[match.end() :]


def front_matter(source: Mapping[str, Any], name: str, revision: str | None, *, tags: Set[str]) -> str:
    """The YAML block a card begins with, from that of the base model's card."""
    values: dict[str, Any] = {"library_name": "transformers"}
    if "/" in name:  # the hub checks that a base model exists there
        values["base_model"] = name
    if revision:
        values["base_model_revision"] = revision
    values |= {key: source[key] for key in _INHERITED if key in source}
    values["tags"] = sorted(tags | {"moeprune"} | set(source.get("tags") or []))
    return f"---\n{_yaml(values)}---\n"


def _yaml(value: Any) -> str:
    from ruamel.yaml import YAML

    stream = io.StringIO()
    yaml = YAML(typ="safe")
    yaml.default_flow_style = False
    yaml.dump(value, stream)
    return stream.getvalue()


def _facts(made: Mapping[str, Any], plan: PrunePlan) -> str:
    sizes, first = made["sizes"], plan.layers[0]
    share = 1 - len(first.kept) / first.num_experts
    rows = [
        ("Base model", f"`{made['base_model']['name']}`"),
        ("Method", f"`{_settings(plan.criterion)}`, solver `{_settings(plan.solver)}`"),
        (
            "Experts a layer",
            f"{len(first.kept)} of {first.num_experts} ({share:.1%} removed), top-{first.top_k} routing",
        ),
        ("Parameters", f"{sizes['parameters']:,} of {sizes['parameters_base']:,}"),
        ("Bytes of weights", f"{sizes['bytes']:,} of {sizes['bytes_base']:,}"),
    ]
    return "| | |\n|---|---|\n" + "".join(f"| {key} | {value} |\n" for key, value in rows)


def _settings(section: Mapping[str, Any]) -> str:
    if section.get("name") == "portfolio":  # its options are whole criteria; the plan inside the checkpoint has them
        return f"portfolio of {', '.join(section.get('criteria', ()))}"
    rest = ", ".join(f"{key}={value}" for key, value in section.items() if key != "name")
    return f"{section.get('name', '?')}" + (f" ({rest})" if rest else "")


def _calibration(plan: PrunePlan, config: Mapping[str, Any] | None) -> str:
    domains = ((config or {}).get("calibration") or {}).get("domains") or []
    lines = [f"- {domain['name']}: `{domain['path']}`" for domain in domains if "name" in domain and "path" in domain]
    if not lines:
        lines = [f"- {name}: weight {weight:g}" for name, weight in plan.mix.items()]
    text = "\n".join(lines) or "- see the statistics that the plan names"
    key = f"Statistics `{plan.statistics_key}`. " if plan.statistics_key else ""
    note = f"{key}Expect it to work on data like this, and measure elsewhere."
    return f"## Calibration data\n\n{text}\n\n{note}\n"


def _mtp(mtp: str) -> str:
    if mtp != "dropped":
        return ""
    return (
        "## Multi-token prediction\n\nThe base model's multi-token-prediction layers were left out and their count in "
        "config.json is 0: they have experts of their own. Speculative decoding with them is not possible.\n"
    )


def _warnings(warnings: tuple[str, ...]) -> str:
    return "## Warnings\n\n" + "".join(f"- {text}\n" for text in warnings) if warnings else ""


def _plan_text(plan: Mapping[str, Any]) -> str:
    """JSON with a line for each layer: hundreds of kept ids are read, if at all, a layer at a time."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in plan.items() if key != "layers"]
    layers = ",\n  ".join(json.dumps(layer) for layer in plan["layers"])
    return "{\n" + "".join(f" {line},\n" for line in lines) + f' "layers": [\n  {layers}\n ]\n}}'


def _details(title: str, language: str, text: str) -> str:
    return f"<details><summary>{title}</summary>\n\n```{language}\n{text.rstrip()}\n```\n\n</details>\n"
