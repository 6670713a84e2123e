"""What a model does when it has to generate: the agent task, run for real, and how often open text becomes a loop.

The agent task as text: questions from trajectories, and what a reply asks for. No model.

A question is the first one of a held-out trajectory, with that trajectory's system message and tools. A reply either
calls a tool, `<tool_call>{"name", "arguments"}</tool_call>`, or answers with an integer after ####.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.plan import PrunePlan
from moeprune.data.tools import run_tool
from moeprune.data.trajectories import TokenSet
from moeprune.evaluation.decoding import end_tokens, generate
from moeprune.evaluation.intervals import base_metrics, share_metrics
from moeprune.evaluation.loops import OpenPrompt, loops, open_prompts
from moeprune.models.pruned import pruned

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


MAX_TURNS = 5
TURN_TOKENS = 48
OPEN_TOKENS = 256
OPEN_PROMPTS = 32
PROMPT_TOKENS = 64
TEMPERATURE = 0.7
Progress = Callable[[int, int], None]  # (models done, models in all)


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
) -> dict[str, dict[str, float]]:
    """Label -> accuracy metrics of `model` pruned by each plan, with `/base` for `model` as it is.

    `base` spares the unpruned model a second run on the same questions (`agent_questions` makes them).
    """
    if not questions or not plans:
        raise InputError("agent_task: give at least one question and one plan; there is nothing to measure")
    base = base or agent_answers(model, tokenizer, questions, batch_size=batch_size)
    metrics = {}
    for label in _each_pruned(model, plans, on_progress):
        answers = agent_answers(model, tokenizer, questions, batch_size=batch_size)
        metrics[label] = accuracy_metrics(name, answers, base)
    return metrics


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
    asking = list(range(len(questions)))
    for _ in range(MAX_TURNS):
        if not asking:
            break
        prompts = [_prompt(tokenizer, histories[i], questions[i].tools) for i in asking]
        replies = generate(model, prompts, max_new_tokens=TURN_TOKENS, end_ids=end_ids, batch_size=batch_size)
        called = []
        for i, reply in zip(asking, replies, strict=True):
            text = tokenizer.decode([token for token in reply if token not in end_ids])
            call = tool_call(text)
            if call is None:
                given[i] = final_answer(text)
            elif (turn := tool_turn(call, questions[i].tool_messages)) is not None:
                histories[i] += turn
                called.append(i)
        asking = called
    return Answers(tuple(questions), tuple(given))


@dataclass(frozen=True)
class OpenOutputs:
    """What one model wrote after the open prompts, and which of the texts are loops."""

    prompts: tuple[OpenPrompt, ...]
    outputs: tuple[tuple[int, ...], ...]
    looped: tuple[bool, ...]


def loop_rate(
    model: Any,
    tokenizer: Any,
    token_set: TokenSet,
    plans: Mapping[str, PrunePlan],
    *,
    prompts: int = OPEN_PROMPTS,
    max_new_tokens: int = OPEN_TOKENS,
    temperature: float = TEMPERATURE,
    seed: int = 0,
    base: OpenOutputs | None = None,
    batch_size: int = 64,
    on_progress: Progress | None = None,
) -> dict[str, dict[str, float]]:
    """Label -> share of open generations that are loops (rules in loops.py), with `/base` for `model` as it is.

    The prompts are beginnings of held-out pieces. Small models loop on nearly every text when they decode greedily,
    pruned or not, so the default samples at 0.7, with the same random numbers for every model.
    """
    end_ids = end_tokens(model, tokenizer)
    chosen = open_prompts(
        token_set, count=prompts, prompt_tokens=PROMPT_TOKENS, max_new_tokens=max_new_tokens, end_ids=end_ids
    )

    def outputs() -> OpenOutputs:
        return open_outputs(
            model,
            tokenizer,
            chosen,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            batch_size=batch_size,
        )

    base = base or outputs()
    return {label: loop_metrics(outputs(), base) for label in _each_pruned(model, plans, on_progress)}


def open_outputs(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[OpenPrompt],
    *,
    max_new_tokens: int = OPEN_TOKENS,
    temperature: float = TEMPERATURE,
    seed: int = 0,
    batch_size: int = 64,
) -> OpenOutputs:
    """What `model` as it is writes after the prompts."""
    end_ids = end_tokens(model, tokenizer)
    outputs = generate(
        model,
        [prompt.ids for prompt in prompts],
        max_new_tokens=max_new_tokens,
        end_ids=end_ids,
        temperature=temperature,
        seed=seed,
        batch_size=batch_size,
    )
    looped = [
        loops(output, tokenizer.decode([*prompt.ids, *output]), prompt=prompt, end_ids=end_ids)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    return OpenOutputs(tuple(prompts), tuple(map(tuple, outputs)), tuple(looped))


def loop_metrics(outputs: OpenOutputs, base: OpenOutputs | None = None) -> dict[str, float]:
    """`generation/loop_rate` over all prompts and `generation/loop_rate.<domain>`; 95 % Wilson intervals."""
    metrics = share_metrics("generation/loop_rate", outputs.looped, [prompt.domain for prompt in outputs.prompts])
    if base is not None:
        of_base = share_metrics("generation/loop_rate", base.looped, [prompt.domain for prompt in base.prompts])
        metrics |= base_metrics(of_base)
    return metrics


def _each_pruned(model: Any, plans: Mapping[str, PrunePlan], on_progress: Progress | None) -> Iterator[str]:
    """Each label in turn, while `model` is pruned by its plan."""
    for done, (label, plan) in enumerate(plans.items(), start=1):
        with pruned(model, plan):
            yield label
        if on_progress is not None:
            on_progress(done, len(plans))


def _prompt(tokenizer: Any, messages: list[Any], tools: Sequence[Any]) -> list[int]:
    encoded = tokenizer.apply_chat_template(
        messages, tools=list(tools) or None, add_generation_prompt=True, tokenize=True, return_dict=True
    )
    return list(encoded["input_ids"])
