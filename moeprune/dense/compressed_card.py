"""What a compressed checkpoint says about itself: the record (moeprune.json) and the card (README.md)."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from moeprune.artifacts.files import read_json
from moeprune.artifacts.run import versions
from moeprune.checkpoint.card import PACKAGES, RECORD_FORMAT, base_model, front_matter, split_front_matter
from moeprune.checkpoint.inventory import Inventory, checkpoint_fingerprint
from moeprune.checkpoint.rewrite import CARD, RECORD
from moeprune.dense.chain import name_of
from moeprune.dense.methods.method import DenseMethod
from moeprune.dense.report import DenseReport


def record(
    source: Inventory,
    report: DenseReport,
    *,
    methods: Sequence[DenseMethod],
    sizes: Mapping[str, int],
    calibration: Mapping[str, Any],
    hashes: Mapping[str, str],
    audit: Mapping[str, Any],
    provenance: Mapping[str, Any],
) -> dict[str, Any]:
    """moeprune.json: that of the source, when it was made by moeprune, and under `dense` what was done to it now."""
    path = source.directory / RECORD
    earlier: dict[str, Any] = read_json(path) if path.is_file() else {}
    earlier.pop("serving", None)  # what engines did with the source says nothing about other weights
    base = earlier.get("sizes", {})
    told = report.plain()
    return {
        **(earlier or _fresh(source)),
        "sizes": {
            **sizes,
            "parameters_base": base.get("parameters_base", sizes["parameters"]),
            "bytes_base": base.get("bytes_base", sizes["bytes_base"]),
        },
        "dense": [
            *earlier.get("dense", []),
            {
                "methods": [method.model_dump(mode="json") for method in methods],
                "calibration": dict(calibration),
                "coverage": told["coverage"],
                "metrics": report.metrics(),
                "warnings": told["warnings"],
            },
        ],
        "config": provenance.get("config"),
        "commit": provenance.get("commit"),
        "versions": versions(PACKAGES),
        "hashes": dict(sorted(hashes.items())),
        "audit": dict(audit),
    }


def _fresh(source: Inventory) -> dict[str, Any]:
    name, revision = base_model(source.directory)
    fingerprint = checkpoint_fingerprint(source)
    return {
        "format": RECORD_FORMAT,
        "base_model": {
            "name": name,
            "revision": revision,
            "model_type": source.memory.config.model_type,
            "fingerprint": fingerprint,
            "config_sha256": hashlib.sha256(source.config_text.encode()).hexdigest(),
            "moeprune": None,
        },
        "fingerprint": fingerprint,
    }


def card(made: Mapping[str, Any], source: Inventory, *, packed: bool, warnings: Sequence[str]) -> str:
    """README.md in Markdown; the card of the checkpoint that was compressed, if it has one, follows below a line."""
    path = source.directory / CARD
    front, body = split_front_matter(path.read_text(encoding="utf-8", errors="replace") if path.is_file() else "")
    base, sizes, dense = made["base_model"], made["sizes"], made["dense"][-1]
    pruned = made.get("plan") is not None
    tags = {"compressed"} | ({"moe", "expert-pruning"} if pruned else set())
    methods = "; ".join(_method(method) for method in dense["methods"])
    experts = "experts were pruned first, then " if pruned else ""
    parts = [
        front_matter(front, base["name"], base["revision"], tags=tags),
        f"# {base['name'].rpartition('/')[2]}, compressed\n",
        f"Made with `moeprune` from `{base['name']}`: {experts}weights were compressed by {methods}. "
        "Nothing was trained; weights that the table calls unchanged have the bytes they had.\n",
        _facts(sizes),
        _coverage(dense["coverage"]),
        _use(packed),
        "## Warnings\n\n" + "".join(f"- {text}\n" for text in warnings) if warnings else "",
    ]
    if body.strip():
        parts.append(f"\n---\n\n## Card of the checkpoint that was compressed\n\n{body.strip()}\n")
    return "\n".join(part for part in parts if part)


def named(method: DenseMethod) -> str:
    """The method and what differs from its defaults, in a line."""
    return _method({"name": name_of(method), **method.model_dump(mode="json", exclude_defaults=True)})


def _method(section: Mapping[str, Any]) -> str:
    rest = [f"{key}={_short(value)}" for key, value in section.items() if key != "name" and value not in (None, False)]
    return f"{section['name']}" + (f" ({', '.join(rest)})" if rest else "")


def _short(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, list) else str(value)


def _facts(sizes: Mapping[str, int]) -> str:
    rows = [
        ("Parameters", f"{sizes['parameters']:,} of {sizes['parameters_base']:,}"),
        ("Bytes of weights", f"{sizes['bytes']:,} of {sizes['bytes_base']:,}"),
    ]
    return "| | |\n|---|---|\n" + "".join(f"| {key} | {value} |\n" for key, value in rows)


def _coverage(rows: Sequence[Mapping[str, Any]]) -> str:
    head = "## What was done to which weights\n\n| Role | Method | Weights | Parameters | For example |\n"
    head += "|---|---|--:|--:|---|\n"
    return head + "".join(
        f"| {row['role']} | {row['methods']} | {row['weights']:,} | {row['parameters']:,} | `{row['example']}` |\n"
        for row in rows
    )


def _use(packed: bool) -> str:
    needs = "Its weights are packed: `pip install compressed-tensors` first.\n\n" if packed else ""
    return (
        f"## Use\n\n{needs}```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained(".", dtype="auto", device_map="auto")\n'
        'tokenizer = AutoTokenizer.from_pretrained(".")\n```\n'
    )
