"""Ids are those of apply_chat_template for every shape of messages and manner of template."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moeprune.artifacts.errors import InputError
from moeprune.data.chats import Encoded
from moeprune.data.encoding import Encoder
from moeprune.data.options import Intake
from moeprune.data.readers import RecordProblem
from moeprune.data.records import normalise
from tests.data.conftest import CALCULATOR, called
from tests.data.templates import CHATML, DROPS_CALLS, MANNERS, TEXT_ARGUMENTS, WITH_BOS

SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "What is 2 + 3?"}
SAY = {"role": "assistant", "content": "It is 5."}
RESULT = {"role": "tool", "name": "calculator", "content": "5"}
CALL = called({"expression": "2 + 3"}, content="")

# name -> messages as stored, messages as the template takes them
SHAPES: dict[str, tuple[list[Any], list[Any]]] = {
    "one question": ([ASK], [ASK]),
    "question and answer": ([ASK, SAY], [ASK, SAY]),
    "system": ([SYSTEM, ASK, SAY], [SYSTEM, ASK, SAY]),
    "tools": ([SYSTEM, ASK, CALL, RESULT, SAY], [SYSTEM, ASK, CALL, RESULT, SAY]),
    "arguments as text": (
        [ASK, called('{"expression": "2 + 3"}', content=""), RESULT, SAY],
        [ASK, CALL, RESULT, SAY],
    ),
    "content null": ([ASK, called({"expression": "2 + 3"}, content=None), RESULT, SAY], [ASK, CALL, RESULT, SAY]),
    "content missing": ([ASK, called({"expression": "2 + 3"}), RESULT, SAY], [ASK, CALL, RESULT, SAY]),
    "content in parts": (
        [{"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 + 3?"}]}, SAY],
        [ASK, SAY],
    ),
    "two results": ([ASK, CALL, RESULT, RESULT, SAY, ASK, SAY], [ASK, CALL, RESULT, RESULT, SAY, ASK, SAY]),
    "reasoning": ([ASK, {**SAY, "reasoning_content": "2 + 3"}] * 2, [ASK, {**SAY, "reasoning_content": "2 + 3"}] * 2),
    "two answers": ([ASK, SAY, SAY], [ASK, SAY, SAY]),
    "two calls in one turn": (
        [ASK, {**CALL, "tool_calls": CALL["tool_calls"] * 2}, RESULT, RESULT, SAY],
        [ASK, {**CALL, "tool_calls": CALL["tool_calls"] * 2}, RESULT, RESULT, SAY],
    ),
    "unicode": ([{"role": "user", "content": "a\u2028b\u0085c\u00e9\U0001f600\t"}, SAY],) * 2,
}


def encode(tokenizer: Any, value: Any, **options: Any) -> Encoded:
    intake = Intake(template=options.pop("template", "model"))
    encoded = Encoder(tokenizer, intake, **options).encode([normalise(value, "file:1")])[0]
    if isinstance(encoded, RecordProblem):
        raise encoded
    return encoded


def expected(tokenizer: Any, messages: list[Any], tools: list[Any] | None = None) -> list[int]:
    out = tokenizer.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=True)
    ids: list[int] = out["input_ids"]
    return ids


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("manner", [*MANNERS, "reference"])
def test_ids_equal_the_template(tokenizer: Any, speaking: Callable[..., Any], manner: str, shape: str) -> None:
    chosen = tokenizer if manner == "reference" else speaking(MANNERS[manner])
    stored, normal = SHAPES[shape]
    if manner == "text arguments":  # this template wants text, the same for both ways of storing
        normal = json.loads(json.dumps(normal))
        for message in normal:
            for call in message.get("tool_calls", []):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    for tools in (None, [], [CALCULATOR]):
        value = {"messages": stored} if tools is None else {"messages": stored, "tools": tools}
        encoded = encode(chosen, value)
        assert encoded.ids.tolist() == expected(chosen, normal, tools)
        assert encoded.counted.all()
        assert "None" not in chosen.decode(encoded.ids)


@pytest.mark.parametrize("template", [WITH_BOS, CHATML])
def test_bos_is_what_the_template_says_and_never_two(with_bos: Callable[..., Any], template: str) -> None:
    chosen = with_bos(template)
    ids = encode(chosen, {"messages": [ASK, SAY]}).ids.tolist()
    assert ids == expected(chosen, [ASK, SAY])
    assert ids.count(0) == (1 if template == WITH_BOS else 0)


def test_a_rendered_text_keeps_one_bos(with_bos: Callable[..., Any]) -> None:
    chosen = with_bos(WITH_BOS)
    text = chosen.apply_chat_template([ASK, SAY], tokenize=False)
    encoded = encode(chosen, {"text": text})
    assert encoded.ids.tolist() == expected(chosen, [ASK, SAY])
    assert encoded.changes == {"second BOS removed": 1}
    assert encode(chosen, {"text": "a b"}).ids.tolist() == chosen("a b")["input_ids"]


def test_text_gets_nothing_that_the_tokenizer_does_not_add(tokenizer: Any) -> None:
    assert encode(tokenizer, {"text": "Some words."}).ids.tolist() == tokenizer("Some words.")["input_ids"]


@pytest.mark.parametrize("content", ["", None, "I compute."])
def test_a_template_that_drops_calls_is_an_error(speaking: Callable[..., Any], content: str | None) -> None:
    chosen = speaking(DROPS_CALLS)
    value = {"messages": [ASK, called({"expression": "1"}, content=content)]}
    if content:
        with pytest.raises(InputError, match=r"file:1: .*drops 1 of 1 tool calls"):
            encode(chosen, value)
    else:
        assert "calculator" in chosen.decode(encode(chosen, value).ids)
    twice = {"messages": [ASK, {**CALL, "tool_calls": CALL["tool_calls"] * 2}]}
    with pytest.raises(InputError, match="drops 1 of 2"):
        encode(chosen, twice)


def test_dropped_calls_are_found_though_the_tools_name_the_function(speaking: Callable[..., Any]) -> None:
    names = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    with pytest.raises(InputError, match="drops 1 of 1"):
        encode(speaking(names + DROPS_CALLS), {"messages": [ASK, {**CALL, "content": "x"}], "tools": [CALCULATOR]})


def test_objects_and_text_give_the_same_tokens_where_the_template_wants_text(speaking: Callable[..., Any]) -> None:
    chosen = speaking(TEXT_ARGUMENTS)
    one = encode(chosen, {"messages": [ASK, called({"expression": "é"}, content="")]})
    two = encode(chosen, {"messages": [ASK, called('{"expression":"\\u00e9"}', content="")]})
    assert np.array_equal(one.ids, two.ids)
    assert one.changes == {"arguments as text for the template": 1}


def test_a_refusing_template_is_a_problem_of_the_record(speaking: Callable[..., Any]) -> None:
    with pytest.raises(RecordProblem, match="no question") as caught:
        encode(speaking(MANNERS["strict"]), {"messages": [SYSTEM]})
    assert caught.value.reason == "template refused"


def test_without_a_template_there_is_a_named_way_out(speaking: Callable[..., Any]) -> None:
    chosen = speaking(None)
    with pytest.raises(InputError, match=r"calibration\.template=plain"):
        encode(chosen, {"messages": [ASK, SAY]})
    encoded = encode(chosen, {"messages": [ASK, SAY]}, template="plain", count="assistant")
    assert chosen.decode(encoded.ids) == "user: What is 2 + 3?\n\nassistant: It is 5.\n\n"
    assert "It is 5." in chosen.decode(encoded.ids[encoded.counted])
    assert "What" not in chosen.decode(encoded.ids[encoded.counted])
    with pytest.raises(InputError, match="plain rendering drops"):
        encode(chosen, {"messages": [ASK, CALL]}, template="plain")


def test_ids_outside_the_vocabulary_are_a_problem(tokenizer: Any) -> None:
    assert encode(tokenizer, {"input_ids": [0, 4095]}).ids.tolist() == [0, 4095]
    with pytest.raises(RecordProblem, match=r"input_ids\[1\] is 4096, outside the vocabulary of 4096"):
        encode(tokenizer, {"input_ids": [0, 4096]})
    assert encode(tokenizer, {"input_ids": [0, 4096]}, vocab_size=5000).ids.tolist() == [0, 4096]


def test_prompt_and_completion_count_the_completion(tokenizer: Any) -> None:
    value = {"prompt": "The whale ", "completion": "swims away."}
    for count in ("completion", "assistant"):
        encoded = encode(tokenizer, value, count=count)
        assert encoded.ids.tolist() == tokenizer("The whale swims away.")["input_ids"]
        assert tokenizer.decode(encoded.ids[encoded.counted]).strip() == "swims away."
    assert not encode(tokenizer, value, count="tool").counted.any()
