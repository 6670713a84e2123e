"""What a serving engine was seen to do with a checkpoint, kept in its record (moeprune.json) and on its card."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import read_json, write_json, write_text
from moeprune.checkpoint.other_files import CARD, RECORD

SECTION = "serving"  # of moeprune.json: name of the proof -> the proof
_BEGIN, _END = "<!-- moeprune:verified -->", "<!-- /moeprune:verified -->"
_BASE_CARD = "\n---\n\n## Model card of the base model"
_BLOCK = re.compile(rf"\n*{re.escape(_BEGIN)}.*?{re.escape(_END)}\n*", re.DOTALL)


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


def with_table(card: str, proofs: Mapping[str, Mapping[str, Any]]) -> str:
    """The card with the section about these proofs, in its old place or before the first folded part."""
    own, line, base = card.partition(_BASE_CARD)
    section = f"\n\n{_BEGIN}\n{_table(proofs)}{_END}\n\n"
    if _BLOCK.search(own):
        own = _BLOCK.sub(lambda _: section, own, count=1)
    else:
        position = found if (found := own.find("\n<details>")) >= 0 else len(own)
        own = own[:position].rstrip() + section + own[position:].lstrip("\n")
    return own + line + _BLOCK.sub("\n\n", base)  # a base model that was verified says nothing about this one


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
