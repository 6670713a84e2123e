"""Masks against hand-made examples: exactly the words of whoever counts, in several turns."""

from collections.abc import Callable
from typing import Any

import pytest

from moeprune.data.options import Count
from moeprune.data.readers import RecordProblem
from tests.data.conftest import CALCULATOR, called
from tests.data.templates import MANNERS
from tests.data.test_chats import ASK, CALL, RESULT, SAY, SHAPES, SYSTEM, encode

AGAIN = {"role": "user", "content": "And 2 + 4?"}
SIX = {"role": "assistant", "content": "That is 6."}
TRACE = [
    SYSTEM,
    ASK,
    CALL,
    RESULT,
    SAY,
    AGAIN,
    called({"expression": "2 + 4"}, content="Wait."),
    {**RESULT, "content": "6"},
    SIX,
]


def runs(tokenizer: Any, ids: Any, chosen: Any) -> list[str]:
    """The text of every unbroken run of chosen tokens."""
    found: list[list[int]] = []
    for position, token in enumerate(ids.tolist()):
        if chosen[position]:
            if position == 0 or not chosen[position - 1]:
                found.append([])
            found[-1].append(token)
    return [tokenizer.decode(run) for run in found]


REFERENCE_TURNS = [
    '<tool_call>{"name": "calculator", "arguments": {"expression": "2 + 3"}}</tool_call><|im_end|>\n',
    "It is 5.<|im_end|>\n",
    'Wait.<tool_call>{"name": "calculator", "arguments": {"expression": "2 + 4"}}</tool_call><|im_end|>\n',
    "That is 6.<|im_end|>\n",
]
CHATML_TURNS = [
    '<tool_call>calculator {"expression": "2 + 3"}</tool_call><|im_end|>\n',
    "It is 5.<|im_end|>\n",
    'Wait.<tool_call>calculator {"expression": "2 + 4"}</tool_call><|im_end|>\n',
    "That is 6.<|im_end|>\n",
]


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        ("assistant", REFERENCE_TURNS),
        ("completion", REFERENCE_TURNS[2:]),
        (
            "tool",
            [
                "<|im_start|>tool\n<tool_response>5</tool_response><|im_end|>\n",
                "<|im_start|>tool\n<tool_response>6</tool_response><|im_end|>\n",
            ],
        ),
    ],
)
def test_the_reference_template(tokenizer: Any, count: Count, expected: list[str]) -> None:
    encoded = encode(tokenizer, {"messages": TRACE, "tools": [CALCULATOR]}, count=count)
    assert runs(tokenizer, encoded.ids, encoded.counted) == expected


@pytest.mark.parametrize("manner", ["chatml", "with bos", "strict"])
@pytest.mark.parametrize(
    ("count", "expected"),
    [
        ("assistant", CHATML_TURNS),
        ("completion", CHATML_TURNS[2:]),
        ("tool", ["<|im_start|>tool\n5<|im_end|>\n", "<|im_start|>tool\n6<|im_end|>\n"]),
    ],
)
def test_templates_without_markers(
    speaking: Callable[..., Any], manner: str, count: Count, expected: list[str]
) -> None:
    chosen = speaking(MANNERS[manner])
    encoded = encode(chosen, {"messages": TRACE}, count=count)
    assert runs(chosen, encoded.ids, encoded.counted) == expected


def test_a_template_that_rewrites_earlier_turns(speaking: Callable[..., Any]) -> None:
    chosen = speaking(MANNERS["reasoning"])
    messages = [ASK, {**CALL, "reasoning_content": "old"}, RESULT, RESULT, {**SAY, "reasoning_content": "old"}, AGAIN]
    messages += [{**SIX, "reasoning_content": "new"}]
    encoded = encode(chosen, {"messages": messages}, count="assistant")
    assert runs(chosen, encoded.ids, encoded.counted) == [
        # one token holds the end of the announcement and the first LF of the turn: it is the model's
        '\n\n<tool_call>\ncalculator {"expression": "2 + 3"}\n</tool_call><|im_end|>\n',
        "It is 5.<|im_end|>\n",
        "new\n</think>\n\nThat is 6.<|im_end|>\n",  # the prompt for a turn already holds <think>
    ]
    tools = encode(chosen, {"messages": messages}, count="tool")
    both = "<tool_response>5</tool_response>"
    assert runs(chosen, tools.ids, tools.counted) == [f"<|im_start|>user\n{both}\n{both}<|im_end|>\n"]


@pytest.mark.parametrize("manner", ["counts ahead"])
def test_roles_that_a_template_hides_are_not_guessed(speaking: Callable[..., Any], manner: str) -> None:
    chosen = speaking(MANNERS[manner])
    assert encode(chosen, {"messages": TRACE}).changes == {"roles unknown": 1}
    with pytest.raises(RecordProblem, match="count=assistant cannot be told") as caught:
        encode(chosen, {"messages": TRACE}, count="assistant")
    assert caught.value.reason == "roles unknown"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("manner", ["chatml", "reasoning", "closes at the end"])
def test_every_token_has_a_role_and_the_mask_is_the_role(speaking: Callable[..., Any], manner: str, shape: str) -> None:
    chosen = speaking(MANNERS[manner])
    value = {"messages": SHAPES[shape][0]}
    roles = encode(chosen, value).roles
    assert len(roles)
    assert set(roles) <= {"system", "user", "assistant", "tool", "template"}
    assert ((roles == "assistant") == encode(chosen, value, count="assistant").counted).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_markers_give_the_mask_of_transformers(tokenizer: Any, shape: str) -> None:
    stored, normal = SHAPES[shape]
    out = tokenizer.apply_chat_template(normal, return_dict=True, return_assistant_tokens_mask=True)
    encoded = encode(tokenizer, {"messages": stored}, count="assistant")
    assert encoded.counted.tolist() == [bool(mark) for mark in out["assistant_masks"]]


@pytest.mark.parametrize("shape", SHAPES)
def test_prefix_rendering_agrees_with_markers(tokenizer: Any, speaking: Callable[..., Any], shape: str) -> None:
    unmarked = tokenizer.chat_template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    assert unmarked != tokenizer.chat_template
    value = {"messages": SHAPES[shape][0], "tools": [CALCULATOR]}
    for count in ("assistant", "completion", "tool"):
        marked, prefixed = encode(tokenizer, value, count=count), encode(speaking(unmarked), value, count=count)
        assert marked.counted.tolist() == prefixed.counted.tolist()
        assert marked.roles.tolist() == prefixed.roles.tolist()


def test_conversational_prompt_and_completion(tokenizer: Any) -> None:
    value = {"prompt": [SYSTEM, ASK, SAY, AGAIN], "completion": [SIX]}
    encoded = encode(tokenizer, value, count="completion")
    assert runs(tokenizer, encoded.ids, encoded.counted) == ["That is 6.<|im_end|>\n"]
    later = {"prompt": [ASK], "completion": [SAY, AGAIN, SIX]}
    encoded = encode(tokenizer, later, count="completion")
    assert runs(tokenizer, encoded.ids, encoded.counted) == ["It is 5.<|im_end|>\n", "That is 6.<|im_end|>\n"]
