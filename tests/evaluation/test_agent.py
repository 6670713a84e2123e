"""The agent task: what is asked, what a reply means, and the reference model's known score."""

import gzip
import json
from typing import Any

import pytest

from moeprune.artifacts.errors import InputError
from moeprune.evaluation.agent import agent_answers, agent_questions, agent_task, final_answer, tool_call, tool_turn
from moeprune.models.loading import LoadedModel
from moeprune.reference import DATA_DIR
from tests.evaluation.material import random_plan
from tests.tiny import build, tiny_tokenizer


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    with gzip.open(DATA_DIR / "agent.heldout.jsonl.gz", "rt") as lines:
        return [json.loads(next(lines)) for _ in range(200)]


def test_the_first_question_ends_at_the_next_user_message(records: list[dict[str, Any]]) -> None:
    record = next(r for r in records if [m["role"] for m in r["messages"]].count("user") > 1)
    (question,), warnings = agent_questions([record])
    second = [i for i, message in enumerate(record["messages"]) if message["role"] == "user"][1]
    assert question.messages == tuple(record["messages"][:2])
    assert f"#### {question.answer}" in record["messages"][second - 1]["content"]
    assert question.tool_messages == tuple(m for m in record["messages"][:second] if m["role"] == "tool")
    assert question.tools == tuple(record["tools"])
    assert warnings == []


def test_kinds_of_the_reference_questions(records: list[dict[str, Any]]) -> None:
    questions, _ = agent_questions(records)
    kinds = [question.kind for question in questions]
    assert {kind: kinds.count(kind) for kind in kinds} == {"calculator": 118, "lookup": 62, "reading": 20}


def test_records_without_an_answer_are_counted_or_refused(records: list[dict[str, Any]]) -> None:
    bare = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}]}
    questions, warnings = agent_questions([bare, {"text": "x"}, records[0]])
    assert len(questions) == 1
    assert "2 of 3" in warnings[0]
    with pytest.raises(InputError, match="none of 1 agent records"):
        agent_questions([records[0] | {"messages": records[0]["messages"][:1]}])


def test_replies() -> None:
    assert tool_call('<tool_call>{"a": 1}</tool_call>#### 3') == '{"a": 1}'
    assert tool_call("#### 3") is None
    assert final_answer("so #### -12. #### 5") == "-12"
    assert final_answer("#### 007") == "7"
    assert final_answer("7") is None


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1]",
        "3",
        '{"name": "calculator"}',
        '{"name": "rm", "arguments": {}}',
        '{"name": null, "arguments": 3}',
        "[" * 99999,
    ],
)
def test_calls_that_cannot_be_executed(text: str) -> None:
    assert tool_turn(text, ()) is None


def test_a_call_becomes_two_messages() -> None:
    call, result = tool_turn('{"name": "calculator", "arguments": {"expression": "7 * 6"}}', ()) or [{}, {}]
    assert call["tool_calls"][0]["function"] == {"name": "calculator", "arguments": {"expression": "7 * 6"}}
    assert result == {"role": "tool", "name": "calculator", "content": "42"}


def test_the_reference_answers_everything_and_random_pruning_does_not(
    reference: LoadedModel, records: list[dict[str, Any]]
) -> None:
    questions, _ = agent_questions(records, count=40)
    whole = agent_answers(reference.model, reference.tokenizer, questions)
    assert whole.correct == [True] * 40
    alone = agent_answers(reference.model, reference.tokenizer, questions[:8], batch_size=1)
    assert alone.given == whole.given[:8]
    metrics = agent_task(
        reference.model, reference.tokenizer, questions, {"random": random_plan(reference.model, 16)}, base=whole
    )["random"]
    assert metrics["task/accuracy/agent/base"] == 1
    assert metrics["task/accuracy/agent"] < 0.5
    assert (
        metrics["task/accuracy/agent/ci_low"]
        <= metrics["task/accuracy/agent"]
        <= metrics["task/accuracy/agent/ci_high"]
    )
    assert "task/accuracy/agent.lookup/base" in metrics
    again = agent_answers(reference.model, reference.tokenizer, questions[:8])
    assert again.given == whole.given[:8]


def test_the_reference_answers_200_of_200(reference: LoadedModel, records: list[dict[str, Any]]) -> None:
    questions, _ = agent_questions(records)
    assert all(agent_answers(reference.model, reference.tokenizer, questions).correct)


def test_a_tokenizer_without_a_template_is_refused(records: list[dict[str, Any]]) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    questions, _ = agent_questions(records, count=1)
    with pytest.raises(InputError, match="chat template"):
        agent_answers(build("qwen3_moe"), tokenizer, questions)
