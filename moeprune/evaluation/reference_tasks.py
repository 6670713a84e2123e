"""The held-out reference data as documents for lm-eval; the task files in harness_tasks/ name these functions."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from moeprune.data.options import Domain
from moeprune.data.trajectories import load_records
from moeprune.evaluation.agent import final_answer, tool_call
from moeprune.models.loading import load_tokenizer
from moeprune.reference import MODEL_DIR

QUESTIONS = 200
CHARACTERS = 4000  # of each text: its beginning


def text(*, domain: str, **_: Any) -> dict[str, Any]:
    """A data set with one split: the beginnings of a domain's held-out texts."""
    from datasets import Dataset

    records = load_records(Domain(name=domain, path=f"reference:{domain}"), part="heldout")
    return {"test": Dataset.from_list([{"text": record["text"][:CHARACTERS]} for record in records])}


def agent(*, turn: str, **_: Any) -> dict[str, Any]:
    """A data set with one split: the `turn` ("call" or "answer") of the first questions, rendered by the template.

    A call is what stands between the tags of the first reply where it calls a tool; an answer is the integer of the
    last reply, and its context holds the tool's results.
    """
    from datasets import Dataset

    records = load_records(Domain(name="agent", path="reference:agent"), part="heldout")[:QUESTIONS]
    tokenizer = load_tokenizer(MODEL_DIR)
    documents = [document for record in records if (document := _turn(record, tokenizer, turn)) is not None]
    return {"test": Dataset.from_list(documents)}


def perplexities(document: Mapping[str, Any], results: Sequence[float]) -> dict[str, tuple[float, int]]:
    """(log-likelihood, length) of one text for each of the three measures."""
    (likelihood,) = results
    words, size = len(re.split(r"\s+", document["text"])), len(document["text"].encode())
    return {
        "word_perplexity": (likelihood, words),
        "byte_perplexity": (likelihood, size),
        "bits_per_byte": (likelihood, size),
    }


def _turn(record: Mapping[str, Any], tokenizer: Any, turn: str) -> dict[str, str] | None:
    messages = record["messages"]
    asked = next(i for i, message in enumerate(messages) if message["role"] == "user")
    end = next((i for i in range(asked + 1, len(messages)) if messages[i]["role"] == "user"), len(messages))
    last = asked + 1 if turn == "call" else end - 1
    context = _render(tokenizer, record, last, generate=True)
    if turn == "answer":
        return {"context": context, "target": str(final_answer(messages[last]["content"]))}
    if not messages[last].get("tool_calls"):
        return None
    whole = _render(tokenizer, record, last + 1, generate=False)
    # Between the tags: lm-eval drops special tokens from what a model writes, and the tags are special ones.
    return {"context": context, "target": str(tool_call(whole[len(context) :]))}


def _render(tokenizer: Any, record: Mapping[str, Any], count: int, *, generate: bool) -> str:
    return str(
        tokenizer.apply_chat_template(
            record["messages"][:count], tools=record.get("tools"), add_generation_prompt=generate, tokenize=False
        )
    )
