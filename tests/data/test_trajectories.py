"""Ids are the template's, limits are met, and the order of files changes nothing."""

import gzip
import hashlib
import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moeprune.artifacts.errors import InputError
from moeprune.data.options import Domain, Intake
from moeprune.data.trajectories import Sequence, TokenSet, collate, load_records, load_tokens, plan_batches
from moeprune.reference import DATA_DIR, DOMAINS

AGENT = Domain(name="agent", path="reference:agent")


def reference_records(name: str, held: str = "calibration") -> list[dict[str, Any]]:
    with gzip.open(DATA_DIR / f"{name}.{held}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def content(token_set: TokenSet) -> list[tuple[str, str, int, bytes, bytes]]:
    return [(s.domain, s.trajectory, s.piece, s.ids.tobytes(), s.counted.tobytes()) for s in token_set.sequences]


def test_ids_of_reference_trajectories_equal_the_template(tokenizer: Any) -> None:
    token_set = load_tokens([AGENT], tokenizer, Intake(sequence_length=4096))
    expected = {}
    for record in reference_records("agent"):
        ids = tokenizer.apply_chat_template(record["messages"], tools=record["tools"], return_dict=True)["input_ids"]
        expected[hashlib.sha256(np.asarray(ids, dtype="<i8").tobytes()).hexdigest()] = ids
    assert {s.trajectory: s.ids.tolist() for s in token_set.sequences} == expected
    assert token_set.manifest["agent"]["tokens"] == sum(map(len, expected.values()))


@pytest.mark.parametrize("name", DOMAINS)
def test_pieces_of_a_trajectory_join_to_it(tokenizer: Any, name: str) -> None:
    domain = Domain(name=name, path=f"reference:{name}")
    token_set = load_tokens([domain], tokenizer, Intake(sequence_length=100), part="heldout")
    pieces: dict[str, list[Sequence]] = {}
    for sequence in token_set.sequences:
        assert len(sequence.ids) <= 100
        pieces.setdefault(sequence.trajectory, []).append(sequence)
    for trajectory, parts in pieces.items():
        whole = np.concatenate([part.ids for part in sorted(parts, key=lambda part: part.piece)])
        assert hashlib.sha256(whole.astype("<i8").tobytes()).hexdigest() == trajectory
    assert len(pieces) == len(reference_records(name, "heldout"))


@pytest.mark.parametrize("limit", [1, 100, 5000])
def test_the_limit_is_met_exactly_and_more_of_it_is_a_superset(tokenizer: Any, limit: int) -> None:
    fewer = load_tokens([AGENT.model_copy(update={"tokens": limit})], tokenizer)
    more = load_tokens([AGENT.model_copy(update={"tokens": 2 * limit})], tokenizer)
    assert (fewer.tokens, more.tokens) == (limit, 2 * limit)
    assert {s.trajectory for s in fewer.sequences} <= {s.trajectory for s in more.sequences}
    assert fewer.manifest["agent"]["overflow"]["trajectories_cut_by_limit"] <= 1


def test_seeds_sample_differently_and_repeatably(tokenizer: Any) -> None:
    domain = AGENT.model_copy(update={"tokens": 3000})
    first = content(load_tokens([domain], tokenizer, Intake(seed=1)))
    assert first == content(load_tokens([domain], tokenizer, Intake(seed=1)))
    assert first != content(load_tokens([domain], tokenizer, Intake(seed=2)))


@pytest.mark.parametrize("tokens", [None, 3000])
def test_order_of_records_and_files_changes_nothing(
    tokenizer: Any, write: Callable[..., str], tokens: int | None
) -> None:
    records = reference_records("agent")[:60]
    one = write(records, "one.jsonl")
    random.Random(0).shuffle(records)
    two, three = write(records[:25], "part-z.jsonl"), write(records[25:], "part-a.jsonl")
    assert two > three
    whole = load_tokens([Domain(name="d", path=one, tokens=tokens)], tokenizer)
    parts = load_tokens([Domain(name="d", path=two.replace("part-z", "part-*"), tokens=tokens)], tokenizer)
    assert content(whole) == content(parts)


def test_holdout_divides_a_users_file(tokenizer: Any, write: Callable[..., str]) -> None:
    domain = Domain(name="d", path=write(reference_records("agent")[:200]))
    every = {s.trajectory for s in load_tokens([domain], tokenizer).sequences}
    held = {s.trajectory for s in load_tokens([domain], tokenizer, part="heldout", holdout=0.2).sequences}
    kept = {s.trajectory for s in load_tokens([domain], tokenizer, part="calibration", holdout=0.2).sequences}
    assert held | kept == every
    assert not held & kept
    assert 20 <= len(held) <= 60
    with pytest.raises(InputError, match=r"evaluation\.holdout is 0"):
        load_tokens([domain], tokenizer, part="heldout")


def test_load_records_gives_messages_and_tools(tokenizer: Any, write: Callable[..., str]) -> None:
    assert load_records(AGENT, part="heldout") == reference_records("agent", "heldout")
    records = reference_records("agent")[:50]
    domain = Domain(name="d", path=write(records))
    held = load_records(domain, part="heldout", tokenizer=tokenizer, holdout=0.3)
    kept = load_records(domain, part="calibration", tokenizer=tokenizer, holdout=0.3)
    assert [r for r in records if r in held] == held
    assert [r for r in records if r not in held] == kept


def test_both_halves_are_there(tokenizer: Any) -> None:
    sequences = load_tokens([AGENT], tokenizer).sequences
    halves = [sequence.half for sequence in sequences]
    assert all((s.half == "even") == (int(s.trajectory, 16) % 2 == 0) for s in sequences)
    assert 0.4 < halves.count("even") / len(halves) < 0.6


@pytest.mark.parametrize("batch_tokens", [64, 1000, 8192])
def test_batches_hold_every_sequence_once_within_the_limit(tokenizer: Any, batch_tokens: int) -> None:
    domains = [Domain(name=name, path=f"reference:{name}", tokens=6000) for name in ("agent", "prose")]
    sequences = load_tokens(domains, tokenizer).sequences
    batches = plan_batches(sequences, batch_tokens)
    assert sorted(index for batch in batches for index in batch) == list(range(len(sequences)))
    for batch in batches:
        members = [sequences[index] for index in batch]
        assert len({(s.domain, s.half) for s in members}) == 1
        assert len(batch) == 1 or len(batch) * max(len(s.ids) for s in members) <= batch_tokens


def test_batches_do_not_depend_on_the_order(tokenizer: Any) -> None:
    sequences = list(load_tokens([AGENT.model_copy(update={"tokens": 20000})], tokenizer).sequences)
    shuffled = list(sequences)
    random.Random(3).shuffle(shuffled)
    batches = [[sequences[i] for i in batch] for batch in plan_batches(sequences, 2048)]
    again = [[shuffled[i] for i in batch] for batch in plan_batches(shuffled, 2048)]
    assert [[id(s) for s in batch] for batch in batches] == [[id(s) for s in batch] for batch in again]


def test_collate_pads_on_the_right_and_keeps_everything() -> None:
    one = Sequence(np.array([5, 6, 0], dtype=np.int32), np.array([True, False, True]), "d", "00")
    two = Sequence(np.array([7], dtype=np.int32), np.array([True]), "d", "02")
    input_ids, attention_mask, counted = collate([one, two])
    assert input_ids.shape == attention_mask.shape == counted.shape
    assert attention_mask.sum(dim=1).tolist() == [3, 1]
    assert attention_mask[:, :3].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert input_ids[:, :3].tolist() == [[5, 6, 0], [7, 0, 0]]
    assert counted[:, :3].tolist() == [[True, False, True], [True, False, False]]
    assert not counted[:, 3:].any()
    assert str(input_ids.dtype) == str(attention_mask.dtype) == "torch.int64"
