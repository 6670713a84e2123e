"""Near-duplicates: exactly those that all pairs compared one by one would find."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from moeprune.artifacts.errors import InputError
from moeprune.data.options import Domain, Intake
from moeprune.data.records import SHINGLE, Record, without_near_duplicates
from moeprune.data.trajectories import load_tokens

pytest.importorskip("datasketch")


def noisy_texts(count: int) -> list[str]:
    """Texts of 60 words, half of them earlier ones with a few words changed."""
    chooser = random.Random(5)
    texts: list[list[str]] = []
    for _ in range(count):
        if texts and chooser.random() < 0.5:
            words = list(chooser.choice(texts))
            for _ in range(chooser.randint(0, 6)):
                words[chooser.randrange(60)] = f"w{chooser.randrange(1000)}"
        else:
            words = [f"w{chooser.randrange(1000)}" for _ in range(60)]
        texts.append(words)
    return [" ".join(words) for words in texts]


def naive(texts: list[str], threshold: float) -> list[str]:
    kept: list[tuple[str, set[tuple[str, ...]]]] = []
    for text in texts:
        words = text.split()
        runs = {tuple(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1)}
        if all(len(runs & other) < threshold * len(runs | other) for _, other in kept):
            kept.append((text, runs))
    return [text for text, _ in kept]


@pytest.mark.parametrize("threshold", [0.3, 0.6, 0.9])
def test_equals_all_pairs(threshold: float) -> None:
    texts = noisy_texts(150)
    dropped: list[int] = []
    records = [Record("f:1", "text", text=text) for text in texts]
    kept = list(without_near_duplicates(records, threshold, on_drop=lambda: dropped.append(1)))
    assert [record.text for record in kept] == naive(texts, threshold)
    assert len(kept) + len(dropped) == len(texts)
    assert dropped


def test_intake_counts_them_and_file_order_changes_nothing(tokenizer: Any, write: Callable[..., str]) -> None:
    texts = noisy_texts(60)
    intake = Intake(near_duplicates=0.5)
    sets = []
    for name, lines in (("a.jsonl", texts), ("b.jsonl", texts[::-1])):
        domain = Domain(name="d", path=write([{"text": text} for text in lines], name))
        sets.append(load_tokens([domain], tokenizer, intake))
    told = sets[0].manifest["d"]
    assert 0 < told["near_duplicates_left_out"] == 60 - told["records_used"]
    assert told["records_beyond_limit"] == 0
    assert [s.trajectory for s in sets[0].sequences] == [s.trajectory for s in sets[1].sequences]


def test_chats_and_ids_are_compared_too(tokenizer: Any, write: Callable[..., str]) -> None:
    chat = {"messages": [{"role": "user", "content": "one two three four five six seven eight nine ten"}]}
    other = {"messages": [{"role": "user", "content": "one two three four five six seven eight nine ten eleven"}]}
    ids = {"input_ids": list(range(50))}
    path = write([chat, other, ids, {"input_ids": [*range(49), 7]}])
    told = load_tokens([Domain(name="d", path=path)], tokenizer, Intake(near_duplicates=0.7)).manifest["d"]
    assert told["near_duplicates_left_out"] == 2


def test_without_the_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(InputError, match=r"moeprune\[dedup\]"):
        list(without_near_duplicates([Record("f:1", "text", text="a")], 0.5, on_drop=lambda: None))
