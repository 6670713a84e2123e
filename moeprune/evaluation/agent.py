"""The agent task as text: questions from trajectories, and what a reply asks for. No model.

A question is the first one of a held-out trajectory, with that trajectory's system message and tools. A reply either
calls a tool, `<tool_call>{"name", "arguments"}</tool_call>`, or answers with an integer after ####.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moeprune.artifacts.errors import InputError
from moeprune.data.tools import run_tool
from moeprune.evaluation.intervals import base_metrics, share_metrics

ANSWER = re.compile(r"####\s*(-?\d+)")
TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class Question:
    """What is asked, with everything needed to answer it and to check the answer."""

    messages: tuple[Mapping[str, Any], ...]  # up to and with the question
    tools: tuple[Mapping[str, Any], ...]
    tool_messages: tuple[Mapping[str, Any], ...]  # results of the original trajectory: lookup answers from them
    answer: str
    kind: str  # the first tool that the original trajectory calls, or "reading"


@dataclass(frozen=True)
class Answers:
    """What one model answered; `given` holds None where no answer came out."""

    questions: tuple[Question, ...]
    given: tuple[str | None, ...]

    @property
    def correct(self) -> list[bool]:
        return [given == question.answer for given, question in zip(self.given, self.questions, strict=True)]


def agent_questions(
    records: Sequence[Mapping[str, Any]], *, count: int | None = None
) -> tuple[list[Question], list[str]]:
    """The first questions of the first `count` records (None: all), and warnings about records without one.

    Raises InputError when no record has a question with an integer after #### in its answer.
    """
    chosen = records[:count]
    questions = [question for question in map(_question, chosen) if question is not None]
    if not questions:
        raise InputError(
            f"evaluation.tasks: none of {len(chosen)} agent records has a first question whose answer ends in #### and "
            "an integer; give records with such answers or leave the task out"
        )
    skipped = len(chosen) - len(questions)
    warnings = [f"agent task: {skipped} of {len(chosen)} records have no answer after #### and are left out"]
    return questions, warnings if skipped else []


def tool_call(text: str) -> str | None:
    """What stands between the first pair of tool call tags of a reply, or None: then it is a final answer."""
    found = TOOL_CALL.search(text)
    return found.group(1) if found else None


def tool_turn(call_text: str, tool_messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """The assistant's call and the tool's result as messages; None when the call cannot be read or executed."""
    try:
        call = json.loads(call_text)
        if not isinstance(call, dict):
            return None
        result = run_tool(call, tool_messages)
    except (ValueError, RecursionError):  # not JSON, or a ToolError
        return None
    function = {"name": call["name"], "arguments": call["arguments"]}
    return [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "name": call["name"], "content": result},
    ]


def final_answer(text: str) -> str | None:
    """The integer after the first ####, or None."""
    found = ANSWER.search(text)
    return str(int(found.group(1))) if found else None


def accuracy_metrics(name: str, answers: Answers, base: Answers | None = None) -> dict[str, float]:
    """`task/accuracy/<name>` and, by kind of question, `task/accuracy/<name>.<kind>`; 95 % Wilson intervals."""
    stem = f"task/accuracy/{name}"
    metrics = share_metrics(stem, answers.correct, [question.kind for question in answers.questions])
    if base is not None:
        metrics |= base_metrics(share_metrics(stem, base.correct, [question.kind for question in base.questions]))
    return metrics


def _question(record: Mapping[str, Any]) -> Question | None:
    messages = record.get("messages") or []
    asked = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if asked is None:
        return None
    end = next((i for i in range(asked + 1, len(messages)) if messages[i]["role"] == "user"), len(messages))
    reply = messages[asked + 1 : end]
    answer = final_answer(str(reply[-1].get("content") or "")) if reply else None
    if answer is None:
        return None
    calls = [call for message in reply for call in message.get("tool_calls") or []]
    kind = str(calls[0].get("function", calls[0]).get("name")) if calls else "reading"
    results = tuple(message for message in reply if message["role"] == "tool")
    return Question(tuple(messages[: asked + 1]), tuple(record.get("tools") or ()), results, answer, kind)
