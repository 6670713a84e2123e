"""Limits, overflow, minimum, warnings: the counts add up and say what was lost."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from moeprune.artifacts.errors import InputError
from moeprune.data.options import Domain, Intake
from moeprune.data.trajectories import TokenSet, load_tokens
from tests.data.conftest import called
from tests.data.test_chats import ASK, CALL, RESULT, SAY
from tests.data.test_trajectories import content, reference_records


def load(tokenizer: Any, path: str, intake: Intake | None = None, **options: Any) -> TokenSet:
    return load_tokens([Domain(name="d", path=path, **options)], tokenizer, intake)


def ids(*lengths: int) -> list[dict[str, Any]]:
    return [{"input_ids": [(i + j) % 4096 for j in range(length)]} for i, length in enumerate(lengths)]


@pytest.mark.parametrize(
    ("overflow", "pieces", "lost", "without_past", "skipped"),
    [
        ("split", [10, 10, 5, 8, 10], 0, 15, {}),
        ("truncate", [10, 8, 10], 15, 0, {}),
        ("skip", [8, 10], 25, 0, {"longer than sequence_length": 1}),
    ],
)
def test_overflow(
    tokenizer: Any,
    write: Callable[..., str],
    overflow: Any,
    pieces: list[int],
    lost: int,
    without_past: int,
    skipped: Any,
) -> None:
    token_set = load(tokenizer, write(ids(25, 8, 10)), Intake(sequence_length=10, overflow=overflow))
    assert sorted(len(s.ids) for s in token_set.sequences) == sorted(pieces)
    told = token_set.manifest["d"]
    assert told["records_skipped"] == skipped
    assert told["tokens"] == token_set.tokens == sum(pieces)
    assert told["overflow"]["tokens_lost"] == lost
    assert told["overflow"]["share_tokens_lost"] == pytest.approx(lost / 43)
    assert told["overflow"]["tokens_without_their_past"] == without_past
    assert any("are lost" in warning for warning in token_set.warnings) == (lost > 0)


def test_everything_too_long_is_an_error_with_the_reason(tokenizer: Any, write: Callable[..., str]) -> None:
    with pytest.raises(InputError, match=r"no usable record \(2 longer than sequence_length"):
        load(tokenizer, write(ids(20, 30)), Intake(sequence_length=10, overflow="skip"))


def test_roles_that_the_template_does_not_know_are_named(tokenizer: Any, write: Callable[..., str]) -> None:
    path = write([{"messages": [{"role": "human", "content": "Hello"}, {"role": "gpt", "content": "Hi"}]}])
    with pytest.raises(InputError, match="gives no token; the chat template writes nothing for the roles human, gpt"):
        load(tokenizer, path)


def test_turns_that_overflow_takes_away(tokenizer: Any, write: Callable[..., str]) -> None:
    path = write([{"messages": [ASK, CALL, RESULT, SAY] * 10}])
    whole = load(tokenizer, path, Intake(sequence_length=4096)).manifest["d"]
    assert whole["overflow"]["assistant_turns"] == 20
    cut = load(tokenizer, path, Intake(sequence_length=whole["tokens"] // 2, overflow="truncate")).manifest["d"]
    lost, halved = cut["overflow"]["assistant_turns_lost"], cut["overflow"]["assistant_turns_cut"]
    assert lost + halved == 10
    assert cut["overflow"]["share_assistant_turns_lost"] == lost / 20
    assert cut["overflow"]["tool_turns_lost"] + cut["overflow"]["tool_turns_cut"] == 5
    split = load(tokenizer, path, Intake(sequence_length=whole["tokens"] // 2)).manifest["d"]
    assert split["overflow"]["assistant_turns_lost"] == 0
    assert split["overflow"]["assistant_turns_without_their_past"] + split["overflow"]["assistant_turns_cut"] == 10


def test_the_end_of_a_long_trace_still_counts(tokenizer: Any, write: Callable[..., str]) -> None:
    messages = [ASK, CALL, {**RESULT, "content": "5 " * 3000}, {**SAY, "content": "The answer is near the end."}]
    token_set = load(tokenizer, write([{"messages": messages}]), Intake(sequence_length=256), count="assistant")
    ids = [token for s in token_set.sequences for token in s.ids[s.counted].tolist()]
    assert tokenizer.decode(ids).endswith("The answer is near the end.<|im_end|>\n")


def test_cap_per_trajectory(tokenizer: Any, write: Callable[..., str]) -> None:
    token_set = load(tokenizer, write(ids(25, 8, 10)), Intake(sequence_length=10), trajectory_tokens=12)
    assert sorted(len(s.ids) for s in token_set.sequences) == [2, 8, 10, 10]
    assert token_set.manifest["d"]["overflow"]["tokens_lost"] == 13
    uncapped = load(tokenizer, write(ids(25, 8, 10)), Intake(sequence_length=10))
    assert {s.trajectory for s in token_set.sequences} == {s.trajectory for s in uncapped.sequences}


def test_counts_add_up(tokenizer: Any) -> None:
    told = load(tokenizer, "reference:agent", count="assistant", tokens=20000).manifest["d"]
    assert sum(told["tokens_by_role"].values()) == told["tokens"] == 20000
    assert told["counted"] == told["tokens_by_role"]["assistant"]
    assert sum(told["length_histogram"].values()) == told["records_used"]
    assert told["records_used"] + told["records_beyond_limit"] == told["records_read"] == 1025
    assert sum(told["shapes"].values()) == sum(told["renderings"].values()) == told["records_used"]
    json.dumps(told, allow_nan=False)


def test_shuffle_changes_nothing_without_a_limit(tokenizer: Any, write: Callable[..., str]) -> None:
    path = write(reference_records("agent")[:40])
    one, two = load(tokenizer, path), load(tokenizer, path, Intake(shuffle=False))
    assert one.manifest == two.manifest
    assert sorted(content(one)) == sorted(content(two))
    assert content(one) != content(two)
    first = load(tokenizer, path, Intake(shuffle=False), tokens=50)
    assert first.sequences[0].trajectory == two.sequences[0].trajectory


def test_minimum_tokens_counts_what_the_mask_leaves(tokenizer: Any, write: Callable[..., str]) -> None:
    path = write([{"messages": [ASK, SAY]}])
    told = load(tokenizer, path, count="assistant").manifest["d"]
    assert 0 < told["counted"] < told["tokens"]
    with pytest.raises(InputError, match=rf"domain d: {told['counted']} tokens count .*minimum_tokens is 20"):
        load(tokenizer, path, Intake(minimum_tokens=20), count="assistant")
    with pytest.raises(InputError, match="0 tokens count"):
        load(tokenizer, path, count="tool")
    with pytest.raises(InputError, match="0 tokens count"):
        load(tokenizer, write([{"text": "no roles here"}]), count="assistant")


def test_few_tokens_and_an_unmet_limit_warn(tokenizer: Any, write: Callable[..., str]) -> None:
    warnings = load(tokenizer, write(ids(999)), tokens=5000).warnings
    assert len(warnings) == 2
    assert "only 999 tokens count" in warnings[0]
    assert "fewer than the limit tokens=5000" in warnings[1]
    assert not load(tokenizer, write(ids(1000))).warnings


def test_skipped_records_are_counted_by_reason_and_named(tokenizer: Any, write: Callable[..., str]) -> None:
    path = write([{"text": "good words"}, {"text": ""}, {"messages": None}, 7, {"text": None}])
    with pytest.raises(InputError, match=r"data\.jsonl:2: text is empty; fix the record or set calibration\.on_bad"):
        load(tokenizer, path)
    token_set = load(tokenizer, path, Intake(on_bad_record="skip"))
    told = token_set.manifest["d"]
    assert told["records_skipped"] == {"bad messages": 1, "bad text": 2, "not an object": 1}
    assert f"{path}:3: messages is null, not a list" in told["skipped_examples"]
    assert any("4 of 5 records skipped" in warning for warning in token_set.warnings)


def test_the_errors_name_the_field(tokenizer: Any, write: Callable[..., str]) -> None:
    path = write([{"messages": [ASK, called("[1]", content="")]}])
    with pytest.raises(InputError) as caught:
        load(tokenizer, path)
    assert str(caught.value) == (
        f"{path}:1: messages[1].tool_calls[0].function.arguments is not a JSON object but a list; "
        "fix the record or set calibration.on_bad_record=skip"
    )


def test_calls_without_tools_and_dropped_roles_are_reported(tokenizer: Any, write: Callable[..., str]) -> None:
    path = write([{"messages": [{"role": "developer", "content": "x"}, ASK, CALL, RESULT, SAY]}])
    token_set = load(tokenizer, path)
    assert token_set.manifest["d"]["calls_without_tools"] == 1
    assert token_set.manifest["d"]["changes"] == {"messages dropped by the template": 1}
    assert sum("call tools without" in w or "leaves out 1 messages" in w for w in token_set.warnings) == 2


def test_duplicates_are_counted(tokenizer: Any, write: Callable[..., str]) -> None:
    told = load(tokenizer, write([*ids(5, 6), *ids(5)])).manifest["d"]
    assert (told["duplicates"], told["records_used"], told["tokens"]) == (1, 3, 16)


def test_an_unknown_part_and_no_domain_are_refused(tokenizer: Any, write: Callable[..., str]) -> None:
    domain = Domain(name="d", path=write(ids(8)))
    with pytest.raises(InputError, match="'calib' is none of all, calibration, heldout"):
        load_tokens([domain], tokenizer, part="calib")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="none was given"):
        load_tokens([], tokenizer)


def test_two_domains_of_one_name_are_an_error(tokenizer: Any) -> None:
    domains = [Domain(name="d", path="reference:c"), Domain(name="d", path="reference:json")]
    with pytest.raises(InputError, match="the name d stands twice"):
        load_tokens(domains, tokenizer)


@pytest.mark.parametrize(
    "options",
    [
        {"name": "a/b"},
        {"name": ""},
        {"path": ""},
        {"tokens": 0},
        {"count": "user"},
        {"fields": {"texts": "a"}},
        {"x": 1},
    ],
)
def test_domains_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Domain(**{"name": "d", "path": "p", **options})


@pytest.mark.parametrize("options", [{"sequence_length": 0}, {"overflow": "wrap"}, {"minimum_tokens": 0}, {"seed": -1}])
def test_intake_is_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Intake(**options)
