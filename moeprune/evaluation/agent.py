"""The agent task: questions of held-out trajectories, tools that are really called, and answers that are checked.

A question is the first one of a trajectory, with that trajectory's system message and tools. A reply either calls a
tool, `<tool_call>{"name", "arguments"}</tool_call>`, or answers with an integer after ####.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.plan import PrunePlan
from moeprune.data.tools import run_tool
from moeprune.evaluation.decoding import end_tokens, generate
from moeprune.evaluation.intervals import share_metrics
from moeprune.evaluation.students import Metrics, Progress, pruned_students, with_base

ANSWER = re.compile(r"####\s*(-?\d+)")
TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
MAX_TURNS = 5
TURN_TOKENS = 48


@dataclass(frozen=True)
class Question:
    """A question, with everything needed to answer it and to check the answer."""

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
    match = TOOL_CALL.search(text)
    return match.group(1) if match else None


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
    match = ANSWER.search(text)
    return str(int(match.group(1))) if match else None


def _question(record: Mapping[str, Any]) -> Question | None:
    messages = record.get("messages") or []
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        return None
    start, end = users[0] + 1, users[1] if len(users) > 1 else len(messages)
    reply = messages[start:end]
    answer = final_answer(str(reply[-1].get("content") or "")) if reply else None
    if answer is None:
        return None
    calls = [call for message in reply for call in message.get("tool_calls") or []]
    kind = str(calls[0].get("function", calls[0]).get("name")) if calls else "reading"
    results = tuple(message for message in reply if message["role"] == "tool")
    return Question(tuple(messages[:start]), tuple(record.get("tools") or ()), results, answer, kind)


def agent_task(
    model: Any,
    tokenizer: Any,
    questions: Sequence[Question],
    plans: Mapping[str, PrunePlan],
    *,
    name: str = "agent",
    base: Answers | None = None,
    batch_size: int = 64,
    on_progress: Progress | None = None,
) -> dict[str, Metrics]:
    """Label -> accuracy metrics of `model` pruned by each plan, with `/base` for `model` as it is.

    base: the unpruned model's answers to the same questions, where they are known.
    """
    if not questions or not plans:
        raise InputError("agent_task: give at least one question and one plan; there is nothing to measure")
    measure = partial(agent_metrics, tokenizer=tokenizer, questions=questions, name=name, batch_size=batch_size)
    known = None if base is None else accuracy_metrics(name, base)
    return with_base(measure, model, pruned_students(model, plans), base=known, on_progress=on_progress)


def agent_metrics(
    model: Any, tokenizer: Any, questions: Sequence[Question], *, name: str = "agent", batch_size: int = 64
) -> Metrics:
    """The accuracy metrics of `model` as it is."""
    return accuracy_metrics(name, agent_answers(model, tokenizer, questions, batch_size=batch_size))


def accuracy_metrics(name: str, answers: Answers) -> Metrics:
    """`task/accuracy/<name>` and, by kind of question, `task/accuracy/<name>.<kind>`; 95 % Wilson intervals."""
    return share_metrics(f"task/accuracy/{name}", answers.correct, [question.kind for question in answers.questions])


def agent_answers(model: Any, tokenizer: Any, questions: Sequence[Question], *, batch_size: int = 64) -> Answers:
    """What `model` answers: greedy, tools executed and their results fed back, MAX_TURNS turns of TURN_TOKENS.

    A call that cannot be read or executed ends the question without an answer, as does running out of turns.
    Raises InputError when the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise InputError("evaluation.tasks: the tokenizer has no chat template, so the agent task cannot be put to it")
    end_ids = end_tokens(model, tokenizer)
    histories = [list(question.messages) for question in questions]
    given: list[str | None] = [None] * len(questions)
    remaining = list(range(len(questions)))
    for _ in range(MAX_TURNS):
        if not remaining:
            break
        prompts = [_prompt(tokenizer, histories[i], questions[i].tools) for i in remaining]
        replies = generate(model, prompts, max_new_tokens=TURN_TOKENS, end_ids=end_ids, batch_size=batch_size)
        called = []
        for i, reply in zip(remaining, replies, strict=True):
            text = tokenizer.decode([token for token in reply if token not in end_ids])
            call = tool_call(text)
            if call is None:
                given[i] = final_answer(text)
            elif (turn := tool_turn(call, questions[i].tool_messages)) is not None:
                histories[i] += turn
                called.append(i)
        remaining = called
    return Answers(tuple(questions), tuple(given))


def _prompt(tokenizer: Any, messages: list[Any], tools: Sequence[Any]) -> list[int]:
    encoded = tokenizer.apply_chat_template(
        messages, tools=list(tools) or None, add_generation_prompt=True, tokenize=True, return_dict=True
    )
    return list(encoded["input_ids"])
