"""Normalising changes what it says, counts it, and names the field of whatever it refuses."""

import json
from typing import Any

import pytest

from moeprune.data.readers import RecordProblem
from moeprune.data.records import Record, normalise
from tests.data.conftest import CALCULATOR, called

ASK = {"role": "user", "content": "x"}
CALL = called({"expression": "1"}, content="")


def refused(value: Any, **options: Any) -> tuple[str, str]:
    with pytest.raises(RecordProblem) as caught:
        normalise(value, "f:1", **options).digest(0)
    return caught.value.reason, caught.value.where


BAD: list[tuple[Any, str, str]] = [
    # in every position: missing, null, empty, of another type
    (None, "not an object", ""),
    (["text"], "not an object", ""),
    ({}, "no known field", ""),
    ({"other": 1}, "no known field", ""),
    ({"messages": None}, "bad messages", "messages"),
    ({"messages": []}, "no messages", "messages"),
    ({"messages": {}}, "bad messages", "messages"),
    ({"messages": "[{"}, "bad messages", "messages"),
    ({"messages": [None]}, "bad message", "messages[0]"),
    ({"messages": ["hello"]}, "bad message", "messages[0]"),
    ({"messages": [ASK, {"content": "x"}]}, "bad message", "messages[1].role"),
    ({"messages": [{"role": None, "content": "x"}]}, "bad message", "messages[0].role"),
    ({"messages": [{"role": 1, "content": "x"}]}, "bad message", "messages[0].role"),
    ({"messages": [{"role": "tool", "content": {"a": 1}}]}, "bad content", "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "bad content", "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "bad content",
        "messages[0].content[0]",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "bad content", "messages[0].content[0]"),
    ({"messages": [ASK, {**CALL, "tool_calls": "x"}]}, "bad tool call", "messages[1].tool_calls"),
    ({"messages": [ASK, {**CALL, "tool_calls": [None]}]}, "bad tool call", "messages[1].tool_calls[0]"),
    ({"messages": [ASK, {**CALL, "tool_calls": [{}]}]}, "bad tool call", "messages[1].tool_calls[0].name"),
    (
        {"messages": [ASK, {**CALL, "tool_calls": [{"function": "f"}]}]},
        "bad tool call",
        "messages[1].tool_calls[0].function",
    ),
    (
        {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
        "bad tool call",
        "messages[0].function_call",
    ),
    ({"messages": [ASK], "tools": "no json"}, "bad tools", "tools"),
    ({"messages": [ASK], "tools": {"a": 1}}, "bad tools", "tools"),
    ({"messages": [ASK], "tools": ["calculator"]}, "bad tools", "tools[0]"),
    ({"conversations": None}, "bad conversations", "conversations"),
    ({"conversations": []}, "no messages", "conversations"),
    ({"conversations": ["x"]}, "bad message", "conversations[0]"),
    ({"conversations": [{"from": "nobody", "value": "x"}]}, "bad message", "conversations[0].from"),
    ({"conversations": [{"from": "function_call", "value": "{"}]}, "bad tool call", "conversations[0].value"),
    ({"prompt": "a"}, "no known field", "completion"),
    ({"prompt": None, "completion": "b"}, "bad text", "prompt"),
    ({"prompt": "a", "completion": ""}, "bad text", "completion"),
    ({"prompt": [ASK], "completion": []}, "no messages", "completion"),
    ({"text": None}, "bad text", "text"),
    ({"text": ""}, "bad text", "text"),
    ({"text": ["a"]}, "bad text", "text"),
    ({"text": "a\ud800b"}, "bad text", ""),
    ({"input_ids": None}, "bad ids", "input_ids"),
    ({"input_ids": []}, "bad ids", "input_ids"),
    ({"input_ids": [1, 2.0]}, "bad ids", "input_ids[1]"),
    ({"input_ids": [1, -1]}, "bad ids", "input_ids[1]"),
    ({"input_ids": [True]}, "bad ids", "input_ids[0]"),
    ({"input_ids": [[1]]}, "bad ids", "input_ids[0]"),
    ({"input_ids": [1, 2], "attention_mask": [1]}, "bad ids", "attention_mask"),
    ({"input_ids": [1, 2], "attention_mask": [0, 0]}, "bad ids", "attention_mask"),
]


@pytest.mark.parametrize(("value", "reason", "where"), BAD)
def test_bad_records_are_refused_by_field(value: Any, reason: str, where: str) -> None:
    assert refused(value) == (reason, where)


@pytest.mark.parametrize("arguments", ["null", "[1]", '{"a": ', "", "5", None, [1], 5, True])
def test_arguments_that_are_no_object(arguments: Any) -> None:
    value = {
        "messages": [
            ASK,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}],
            },
        ]
    }
    assert refused(value) == ("bad tool call", "messages[1].tool_calls[0].function.arguments")


def test_changes_are_made_and_counted() -> None:
    value = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, "b"]},
            called('{"z": 1, "a": null}', content=None, reasoning_content="r"),
            {"role": "tool", "content": "c", "name": "f", "tool_call_id": "1"},
            {"role": "assistant"},
        ],
        "tools": json.dumps([CALCULATOR]),
        "extra": 1,
    }
    before = json.dumps(value)
    record = normalise(value, "f:1")
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"z": 1, "a": None}}}
    assert list(record.messages) == [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": [call]},
        {"role": "tool", "content": "c", "name": "f", "tool_call_id": "1"},
        {"role": "assistant", "content": ""},
    ]
    assert record.tools == (CALCULATOR,)
    assert record.changes == {
        "text parts joined": 1,
        "arguments parsed": 1,
        "content null": 1,
        "content missing": 1,
        "tools parsed": 1,
    }
    assert json.dumps(value) == before


def test_a_clean_record_is_left_alone() -> None:
    messages = [ASK, CALL, {"role": "tool", "name": "calculator", "content": "1"}]
    record = normalise({"messages": messages, "tools": [CALCULATOR]}, "f:1")
    assert record.plain() == {"messages": messages, "tools": [CALCULATOR]}
    assert not record.changes


def test_nulls_of_a_table_go_and_nulls_of_json_stay() -> None:
    value = {
        "text": None,
        "messages": [{**ASK, "tool_calls": None, "name": None}, called({"expression": "1", "item": None}, content="")],
        "tools": [{**CALCULATOR, "strict": None}],
    }
    record = normalise(value, "f row 1", tabular=True)
    assert list(record.messages) == [ASK, called({"expression": "1"}, content="")]
    assert record.tools == (CALCULATOR,)
    assert record.changes["table nulls removed"] == 5
    assert normalise({**value, "tools": []}, "f:1").messages[0] == {**ASK, "tool_calls": None, "name": None}


def test_sharegpt() -> None:
    turns = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "1"},
        {"from": "gpt", "value": "a"},
    ]
    record = normalise({"conversations": turns}, "f:1")
    function = {"name": "f", "arguments": {"a": 1}}
    assert list(record.messages) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "a"},
    ]


def test_fields_are_mapped() -> None:
    def mapped(value: Any, fields: dict[str, str]) -> Record:
        return normalise(value, "f:1", fields=fields)

    trace = {"run": {"trace": [{"speaker": "user", "words": "x"}]}, "functions": [CALCULATOR], "text": "not this"}
    record = mapped(trace, {"messages": "run.trace", "role": "speaker", "content": "words", "tools": "functions"})
    assert (list(record.messages), record.tools) == ([ASK], (CALCULATOR,))
    assert mapped({"body": "a", "messages": [ASK]}, {"text": "body"}).text == "a"
    assert mapped({"a.b": "c"}, {"text": "a.b"}).text == "c"
    assert refused({"text": "a"}, fields={"text": "body"}) == ("no known field", "body")


def test_padding_is_what_the_mask_says() -> None:
    record = normalise({"input_ids": [0, 0, 5, 0], "attention_mask": [0, 1, 1, 1]}, "f:1")
    assert record.ids == (0, 5, 0)
    assert record.changes == {"padding removed": 1}


def test_digest_is_of_the_content_alone() -> None:
    one, two = normalise({"text": "a", "id": 1}, "f:1"), normalise({"id": 2, "text": "a"}, "g:9")
    assert one.digest(0) == two.digest(0) != one.digest(1)
