"""The loop rule on texts whose answer is known, and the rate of the reference model."""

import gzip
import json
from functools import partial

import numpy as np
import pytest

from moeprune.artifacts.errors import InputError
from moeprune.data.trajectories import TokenSet
from moeprune.evaluation.decoding import end_tokens
from moeprune.evaluation.loops import THRESHOLD, OpenPrompt, loop_metrics, loops, open_prompts, repetition
from moeprune.evaluation.students import Student, with_base
from moeprune.models.loading import LoadedModel
from moeprune.reference import DATA_DIR
from tests.evaluation.material import piece, random_plan, random_tokens

END = 3
TEXT = OpenPrompt("d", (10, 11), end_expected=False)
CHAT = OpenPrompt("d", (10, 11), end_expected=True)
OPTIONS = {"count": 4, "prompt_tokens": 20, "max_new_tokens": 40, "end_ids": [END]}


def naive_repetition(tokens: list[int], n: int) -> float:
    repeats = sum(any(tokens[i : i + n] == tokens[j : j + n] for j in range(i)) for i in range(len(tokens) - n + 1))
    return repeats / (len(tokens) - n + 1)


def test_repetition_equals_the_definition() -> None:
    tokens = np.random.default_rng(0).integers(0, 2, 100).tolist()
    assert repetition(tokens, n=4) == pytest.approx(naive_repetition(tokens, 4))
    assert repetition([7] * 50) == pytest.approx(1 - 1 / 43)
    assert repetition(list(range(300))) == 0
    assert repetition([1, 2, 3]) == 0


@pytest.mark.parametrize("period", [1, 5, 30])
def test_an_endless_phrase_is_a_loop_wherever_it_starts(period: int) -> None:
    good = list(range(100, 228))
    assert loops(good + list(range(period)) * (128 // period), "", prompt=TEXT, end_ids=[END])
    assert not loops(good + list(range(20)), "", prompt=TEXT, end_ids=[END])


def test_no_end_counts_where_an_end_is_expected() -> None:
    words = list(range(10, 60))
    assert not loops(words, "", prompt=TEXT, end_ids=[END])
    assert loops(words, "", prompt=CHAT, end_ids=[END])
    assert not loops([*words, END], "", prompt=CHAT, end_ids=[END])
    assert not loops([END], "", prompt=CHAT, end_ids=[END])


def test_reasoning_that_is_not_closed_is_a_loop() -> None:
    assert loops([10, END], "<think>so", prompt=CHAT, end_ids=[END])
    assert not loops([10, END], "<think>so</think>yes", prompt=CHAT, end_ids=[END])


@pytest.mark.parametrize("domain", ["prose", "python", "c", "json", "math"])
def test_held_out_text_itself_is_not_called_a_loop(domain: str, reference: LoadedModel) -> None:
    with gzip.open(DATA_DIR / f"{domain}.heldout.jsonl.gz", "rt") as lines:
        texts = [json.loads(line)["text"][:4000] for line in lines]
    rows = reference.tokenizer(texts)["input_ids"]
    windows = [row[start : start + 128] for row in rows for start in range(0, len(row) - 128, 128)]
    assert np.mean([repetition(window) > THRESHOLD for window in windows]) < 0.02


def test_prompts_do_not_depend_on_the_order_and_are_spread() -> None:
    token_set = random_tokens([100] * 12 + [10], domains=("a", "a", "a", "b"))
    chosen = open_prompts(token_set, **OPTIONS)
    assert [prompt.domain for prompt in chosen] == ["a", "b", "a", "b"]
    assert open_prompts(TokenSet(token_set.sequences[::-1], {}), **OPTIONS) == chosen
    assert all(len(prompt.ids) == 20 for prompt in chosen)


def test_an_end_is_expected_where_the_text_has_one_soon() -> None:
    soon, late = list(range(10, 110)), list(range(10, 110))
    soon[35], late[45] = END, END
    by_name = {
        name: open_prompts(TokenSet((piece(ids),), {}), **OPTIONS)[0].end_expected
        for name, ids in {"soon": soon, "late": late}.items()
    }
    assert by_name == {"soon": True, "late": False}


def test_pieces_that_are_too_short_are_refused() -> None:
    with pytest.raises(InputError, match="32 tokens"):
        open_prompts(random_tokens([31, 5]), **OPTIONS)


def test_pruning_half_at_random_makes_the_reference_loop(reference: LoadedModel) -> None:
    with gzip.open(DATA_DIR / "agent.heldout.jsonl.gz", "rt") as lines:
        records = [json.loads(next(lines)) for _ in range(24)]
    rows = [
        reference.tokenizer.apply_chat_template(r["messages"], tools=r["tools"], return_dict=True)["input_ids"]
        for r in records
    ]
    token_set = TokenSet(tuple(piece(row, domain="agent") for row in rows), {})
    end_ids = end_tokens(reference.model, reference.tokenizer)
    prompts = open_prompts(token_set, end_ids=end_ids, count=16, max_new_tokens=128)
    measure = partial(loop_metrics, tokenizer=reference.tokenizer, prompts=prompts, max_new_tokens=128, batch_size=8)
    students = {"random": Student(reference.model, random_plan(reference.model, 16))}
    metrics = with_base(measure, reference.model, students)["random"]
    assert metrics["generation/loop_rate/base"] == 0
    assert metrics["generation/loop_rate"] > 0.2
    assert metrics["generation/loop_rate.agent"] == metrics["generation/loop_rate"]
    assert (
        metrics["generation/loop_rate/ci_low"]
        < metrics["generation/loop_rate"]
        < metrics["generation/loop_rate/ci_high"] + 1e-9
    )
