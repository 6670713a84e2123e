"""What was measured of a checkpoint after it was written, kept in its record (moeprune.json) and on its card.

Two things: how serving engines answered (`moeprune verify`), and how far it is from the unpruned model.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import read_json, write_json, write_text
from moeprune.checkpoint.rewrite import CARD, RECORD

SECTION = "serving"  # of moeprune.json: name of the proof -> the proof
_BASE_CARD = "\n---\n\n## Model card of the base model"
_PAIRS = (("ci_low", "low"), ("ci_high", "high"))  # names of the lower and of the upper end
_MEASURES = ("fidelity/", "task/", "generation/", "harness/", "speed/")


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
    own, line, base = card.partition(_BASE_CARD)
    section = f"\n\n{begin}\n{text}{end}\n\n"
    if block.search(own):
        own = block.sub(lambda _: section, own, count=1)
    else:
        position = found if (found := own.find("\n<details>")) >= 0 else len(own)
        own = own[:position].rstrip() + section + own[position:].lstrip("\n")
    return own + line + block.sub("\n\n", base)  # what was measured of a base model says nothing about this one


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
