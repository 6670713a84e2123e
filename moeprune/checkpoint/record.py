"""The record of a checkpoint (moeprune.json): what it was made from and how, enough to make it again.

Two sections are added later, here and on the card: how serving engines answered (`moeprune verify`), and how far the
checkpoint is from the unpruned model.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import read_json, write_json, write_text
from moeprune.artifacts.plan import PrunePlan
from moeprune.artifacts.run import versions
from moeprune.checkpoint.inventory import Inventory, checkpoint_fingerprint
from moeprune.checkpoint.rewrite import CARD, RECORD
from moeprune.reference import MODEL_DIR

RECORD_FORMAT = "moeprune.checkpoint/1"
PACKAGES = ("moeprune", "torch", "transformers", "safetensors", "numpy")
SECTION = "serving"  # of moeprune.json: name of the proof -> the proof
_HUB_CACHE = re.compile(r"models--(.+?)--(.+)")
_SOURCE_CARD = re.compile(r"\n---\n\n## (?:Model card of the base model|Card of the checkpoint that was compressed)")
_PAIRS = (("ci_low", "low"), ("ci_high", "high"))  # names of the lower and of the upper end
_MEASURES = ("fidelity/", "task/", "generation/", "harness/", "speed/")


def pruned_record(
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
    """The record of a checkpoint with fewer experts.

    `hashes` are sha256 of every file but the weights (of those, of the header: names, types, shapes); `provenance` is
    what the caller knows: the run's `config`, its `commit`.
    """
    return {
        "format": RECORD_FORMAT,
        "key": key,
        "base_model": _base_model(source, source.memory.model_type, plan.model_fingerprint),
        "fingerprint": fingerprint,
        "sizes": dict(sizes),
        "mtp": mtp,
        "plan": plan.model_dump(mode="json"),
        **_origin(provenance, hashes, audit),
    }


def compressed_record(
    source: Inventory,
    step: Mapping[str, Any],
    *,
    sizes: Mapping[str, int],
    hashes: Mapping[str, str],
    audit: Mapping[str, Any],
    provenance: Mapping[str, Any],
) -> dict[str, Any]:
    """The record of a checkpoint with compressed weights: the source's own, if it has one, and `step` under `dense`."""
    earlier = _earlier(source) or {}
    earlier.pop("serving", None)  # what engines did with the source says nothing about other weights
    base = {key: earlier.get("sizes", {}).get(key, sizes[own]) for key, own in _BASE_SIZES.items()}
    if not earlier:
        fingerprint = checkpoint_fingerprint(source)
        base_model = _base_model(source, source.memory.config.model_type, fingerprint)
        earlier = {"format": RECORD_FORMAT, "base_model": base_model, "fingerprint": fingerprint}
    return {
        **earlier,
        "sizes": {**sizes, **base},
        "dense": [*earlier.get("dense", []), dict(step)],
        **_origin(provenance, hashes, audit),
    }


_BASE_SIZES = {"parameters_base": "parameters", "bytes_base": "bytes_base"}  # of the record -> of this step


def _base_model(source: Inventory, model_type: str, fingerprint: str) -> dict[str, Any]:
    name, revision = name_and_revision(source.directory)
    return {
        "name": name,
        "revision": revision,
        "model_type": model_type,
        "fingerprint": fingerprint,
        "config_sha256": hashlib.sha256(source.config_text.encode()).hexdigest(),
        "moeprune": _earlier(source),
    }


def _earlier(source: Inventory) -> dict[str, Any] | None:
    path = source.directory / RECORD
    return read_json(path) if path.is_file() else None


def _origin(provenance: Mapping[str, Any], hashes: Mapping[str, str], audit: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "config": provenance.get("config"),
        "commit": provenance.get("commit"),
        "versions": versions(PACKAGES),
        "hashes": dict(sorted(hashes.items())),
        "audit": dict(audit),
    }


def name_and_revision(directory: Path) -> tuple[str, str | None]:
    """(name, revision) of the checkpoint: the hub's for one in its cache, the package's own, or the directory's."""
    directory = Path(directory).absolute()
    if directory.resolve() == MODEL_DIR.resolve():
        return "moeprune-reference", None
    for parent in directory.parents:
        match = _HUB_CACHE.fullmatch(parent.name)
        if match is not None and directory.parent.name == "snapshots":
            return f"{match.group(1)}/{match.group(2)}", directory.name
    return directory.resolve().name, None


def require_record(directory: Path) -> dict[str, Any] | None:
    """The checkpoint's record, None when moeprune did not make it. InputError where the result could not be kept."""
    path = directory / RECORD
    if not path.is_file():
        return None
    if not os.access(directory, os.W_OK):
        raise InputError(f"{directory}: cannot be written to, so {RECORD} cannot hold the result; change its mode")
    record = read_json(path)
    if not isinstance(record, dict):
        raise InputError(f"{path}: not a record of moeprune; write the checkpoint again")
    return record


def keep_proof(directory: Path, name: str, proof: Mapping[str, Any]) -> None:
    """Put the proof into moeprune.json, in place of an earlier one of the same name, and the table on the card."""
    record = read_json(directory / RECORD)
    proofs = {**record.get(SECTION, {}), name: dict(proof)}
    write_json(directory / RECORD, {**record, SECTION: dict(sorted(proofs.items()))})
    card = directory / CARD
    if card.is_file():
        write_text(card, with_table(card.read_text(encoding="utf-8"), proofs))


def keep_results(directory: Path, metrics: Mapping[str, float]) -> str | None:
    """Put what was measured into moeprune.json and on the card; nothing where moeprune did not make the checkpoint.

    Returns why they could not be kept, None when all is well.
    """
    if not (directory / RECORD).is_file():
        return None
    if not os.access(directory, os.W_OK):
        return f"{directory}: cannot be written to, so {RECORD} and the card do not hold these results"
    own = {name: value for name, value in metrics.items() if name.startswith(_MEASURES)}
    write_json(directory / RECORD, {**read_json(directory / RECORD), "results": own})
    card = directory / CARD
    if card.is_file():
        text = card.read_text(encoding="utf-8")
        write_text(card, with_section(text, "results", _results(own)))
    return None


def with_table(card: str, proofs: Mapping[str, Mapping[str, Any]]) -> str:
    """The card with the section about these proofs."""
    return with_section(card, "verified", _table(proofs))


def with_section(card: str, name: str, text: str) -> str:
    """The card with this section in its old place, or before the first folded part."""
    begin, end = f"<!-- moeprune:{name} -->", f"<!-- /moeprune:{name} -->"
    block = re.compile(rf"\n*{re.escape(begin)}.*?{re.escape(end)}\n*", re.DOTALL)
    match = _SOURCE_CARD.search(card)
    start = match.start() if match else len(card)
    own, source_card = card[:start], card[start:]
    section = f"\n\n{begin}\n{text}{end}\n\n"
    if block.search(own):
        own = block.sub(lambda _: section, own, count=1)
    else:
        position = own.find("\n<details>")
        position = len(own) if position < 0 else position
        own = own[:position].rstrip() + section + own[position:].lstrip("\n")
    return own + block.sub("\n\n", source_card)  # what was measured of the source says nothing about this one


def _results(metrics: Mapping[str, float]) -> str:
    """A row a measure, beside the unpruned model's figure and the interval or range, where there are any."""
    lines = ["## Results\n", "| measure | this model | unpruned |", "|---|---|---|"]
    ends = ("/base", "/ci_low", "/ci_high", "/low", "/high")
    for name in sorted(name for name in metrics if not name.endswith(ends)):
        low, high = (_end(metrics, name, pair) for pair in _PAIRS)
        interval = "" if low is None or high is None else f" [{low:.4g}, {high:.4g}]"
        base = metrics.get(f"{name}/base")
        lines.append(f"| {name} | {metrics[name]:.4g}{interval} | {'' if base is None else f'{base:.4g}'} |")
    note = "KL in nats per token to the unpruned model; brackets: 95 % intervals, of speed the range."
    return "\n".join(lines) + f"\n\n{note}\n"


def _table(proofs: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [
        "## Verified in serving engines\n",
        "| engine | computes in | tokens equal | log-probabilities differ by | tokenizer, chat | result |",
        "|---|---|---|---|---|---|",
    ]
    for proof in (value for _, value in sorted(proofs.items())):
        chats = proof["chats"].values()
        chat = f"{sum(how == 'equal' for how in chats)} of {len(chats)} chats equal" if chats else "no chat template"
        verdict = "as in memory" if proof["passed"] else "DIFFERENT"
        if proof["passed"] and proof["tolerance"] is None:
            verdict = "quantised: measured only"
        lines.append(
            f"| {proof['engine']} {proof['version']} | {proof['dtype']} "
            f"| {proof['tokens_equal']} of {proof['tokens']} | "
            f"{proof['difference_mean']:.1e} nats, {proof['difference_most']:.1e} at most "
            f"| {proof['tokenizer']}, {chat} | {verdict} |"
        )
    return "\n".join(lines) + "\n\nGreedy tokens on fixed prompts, against " + _against(proofs) + ".\n"


def _against(proofs: Mapping[str, Mapping[str, Any]]) -> str:
    return " and ".join(sorted({str(proof["compared_with"]) for proof in proofs.values()}))


def _end(metrics: Mapping[str, float], name: str, ends: tuple[str, ...]) -> float | None:
    return next((metrics[f"{name}/{end}"] for end in ends if f"{name}/{end}" in metrics), None)
