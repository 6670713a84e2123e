"""On-policy traces: conversations that the unpruned model writes, so that calibration sees its own behaviour.

    traces = write_traces(reply, tokenizer, prompts, Path("traces.jsonl"), end_ids=..., settings={...})

`reply` turns prompts in tokens into new tokens (evaluation.decoding.generate with a model bound to it). Prompts are
answered in fixed batches; each finished batch is on disk before the next begins, so a stopped run goes on where it was
and ends with the same file.

Of a recorded chat only the user's messages are put to the model again.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import write_text
from moeprune.data.manifest import Tally
from moeprune.data.options import Domain, Intake
from moeprune.data.readers import RecordProblem
from moeprune.data.records import normalise
from moeprune.data.sources import open_source
from moeprune.data.tools import TOOLS, ToolError, read_calls, run_tool

FORMAT = "moeprune.traces/1"
Reply = Callable[[list[list[int]]], list[list[int]]]
End = Literal["answer", "turns", "length", "bad call"]


@dataclass(frozen=True)
class Prompt:
    """Either a script of user messages, played one after the other, or a text to go on with."""

    place: str
    opening: tuple[dict[str, Any], ...] = ()  # system messages before the first question
    questions: tuple[dict[str, Any], ...] = ()  # user messages
    results: tuple[tuple[dict[str, Any], ...], ...] = ()  # of each question, the tool messages the record has
    tools: tuple[dict[str, Any], ...] = ()
    text: str = ""


def load_prompts(domain: Domain, intake: Intake | None = None) -> tuple[list[Prompt], list[str]]:
    """The prompts behind `domain.path` in the order of its files, and warnings about records left out.

    A record is a chat (its user messages are played, its answers forgotten), {"prompt": text or messages}, or
    {"text"}: a beginning that the model goes on with. Raises InputError when there is none.
    """
    intake = intake or Intake()
    tally = Tally(domain, intake, "all")
    prompts = []
    for raw in open_source(domain).records:
        tally.read()
        try:
            if raw.problem:
                raise raw.problem
            prompts.append(_prompt(raw.value, raw.place, domain.fields or {}, tabular=raw.tabular))
        except RecordProblem as problem:
            tally.problem(problem, raw.place)
    if not prompts:
        raise tally.nothing_usable()
    return prompts, tally.skip_warnings()


def _prompt(value: Any, place: str, fields: Mapping[Any, str], *, tabular: bool) -> Prompt:
    key = fields.get("prompt", "prompt")
    if isinstance(value, dict) and key in value and not {"messages", "conversations"} & set(value):
        prompt = value[key]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        value = {"messages": messages, **({"tools": value["tools"]} if "tools" in value else {})}
        fields = {ours: theirs for ours, theirs in fields.items() if ours in ("role", "content")}
    record = normalise(value, place, fields=fields, tabular=tabular)
    if record.kind == "text":
        return Prompt(place, text=record.text)
    if record.kind != "messages":
        raise RecordProblem("no question", "", "is neither a chat, a prompt nor a text")
    questions = [index for index, message in enumerate(record.messages) if message["role"] == "user"]
    if not questions:
        raise RecordProblem("no question", "messages", "has no user message")
    ends = [*questions[1:], len(record.messages)]
    segments = [record.messages[start:end] for start, end in zip(questions, ends)]
    return Prompt(
        place,
        opening=tuple(message for message in record.messages[: questions[0]] if message["role"] != "assistant"),
        questions=tuple(segment[0] for segment in segments),
        results=tuple(tuple(message for message in segment if message["role"] == "tool") for segment in segments),
        tools=record.tools or (),
    )


@dataclass(frozen=True)
class TraceOptions:
    """How a conversation goes; `context` bounds a whole trace in tokens."""

    tools: Literal["reference", "none"] = "none"  # reference: calculator and lookup are offered and executed
    turns: int = 5  # model turns for one question
    context: int = 4096
    batch_size: int = 32


@dataclass
class Trace:
    """A conversation while it is written."""

    prompt: Prompt
    messages: list[dict[str, Any]]
    questions: int = 0  # put so far
    turns: int = 0  # model turns since the last question
    end: End | None = None
    changed: int = 0  # turns that the template writes with other tokens than the model did
    tokens: int = 0  # written by the model
    completion: str = ""


@dataclass(frozen=True)
class TraceReport:
    path: Path
    traces: int
    resumed: int  # traces that an earlier, stopped run had written
    ends: Mapping[str, int]
    tokens: int  # written by the model in this run
    warnings: list[str] = field(default_factory=list)


def write_traces(
    reply: Reply,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    path: Path,
    *,
    end_ids: Sequence[int],
    settings: Mapping[str, Any],
    options: TraceOptions | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> TraceReport:
    """Writes one trace a prompt, in order, and reports how they ended.

    `settings` is everything that decides the words (model, seed, temperature, prompts): a stopped file with other
    settings is not continued. Raises InputError for that, for an existing file and for chats without a chat template.
    """
    options = options or TraceOptions()
    assert options.batch_size > 0
    assert options.turns > 0
    if path.exists():
        raise InputError(f"{path} is there already; give another name or remove it")
    if any(prompt.questions for prompt in prompts) and not getattr(tokenizer, "chat_template", None):
        raise InputError('the tokenizer has no chat template to put a chat to the model; give {"text"} prompts')
    partial = path.with_name(f"{path.name}.partial")
    lines = _resume(partial, {**settings, "options": vars(options), "prompts": len(prompts)}, options.batch_size)
    resumed, ends, tokens, changed = len(lines), Counter(json.loads(line)["end"] for line in lines), 0, 0
    speaker = _Speaker(reply, tokenizer, options, frozenset(end_ids))
    for start in range(resumed, len(prompts), options.batch_size):
        traces = speaker.talk(prompts[start : start + options.batch_size])
        fresh = [json.dumps(_written(trace), ensure_ascii=False) + "\n" for trace in traces]
        with partial.open("a", encoding="utf-8") as out:
            out.write("".join(fresh))
            out.flush()
            os.fsync(out.fileno())
        lines += fresh
        ends.update(str(trace.end) for trace in traces)
        tokens += sum(trace.tokens for trace in traces)
        changed += sum(trace.changed for trace in traces)
        if on_progress is not None:
            on_progress(len(lines), len(prompts))
    write_text(path, "".join(lines))
    partial.unlink()
    return TraceReport(
        path, len(lines), resumed, dict(sorted(ends.items())), tokens, _warnings(ends, len(lines), changed)
    )


def _warnings(ends: Counter[str], traces: int, changed: int) -> list[str]:
    reasons = {
        "length": "were cut off in the middle of a turn; raise the tokens of a turn or the context",
        "turns": "used up their turns without an answer",
        "bad call": "called a tool in a way that nothing can execute",
    }
    warnings = [f"{ends[end]} of {traces} traces {what}" for end, what in reasons.items() if ends[end]]
    if changed:
        warnings.append(f"the chat template writes {changed} turns with other tokens than the model did")
    return warnings


def _resume(partial: Path, settings: dict[str, Any], batch_size: int) -> list[str]:
    """The lines of whole batches that a stopped run left; the file then holds its header and these alone."""
    header = json.dumps({"format": FORMAT, "settings": settings}, sort_keys=True) + "\n"
    lines: list[str] = []
    if partial.is_file():
        first, *rest = partial.read_bytes().split(b"\n")[:-1] or [b""]  # what no LF ends was cut off
        if first and first != header.encode().rstrip():
            raise InputError(f"{partial} was begun with other settings; remove it or give another name")
        lines = [line.decode("utf-8") + "\n" for line in rest[: len(rest) // batch_size * batch_size]]
    write_text(partial, header + "".join(lines))
    return lines


def _written(trace: Trace) -> dict[str, Any]:
    if trace.prompt.text:
        return {"prompt": trace.prompt.text, "completion": trace.completion, "end": trace.end}
    tools = {"tools": list(trace.prompt.tools)} if trace.prompt.tools else {}
    return {"messages": trace.messages, **tools, "end": trace.end}


@dataclass(frozen=True)
class _Speaker:
    """Puts prompts to the model and lets it talk until every trace has ended."""

    reply: Reply
    tokenizer: Any
    options: TraceOptions
    end_ids: frozenset[int]

    def talk(self, prompts: Sequence[Prompt]) -> list[Trace]:
        traces = [self._begin(prompt) for prompt in prompts]
        while active := [trace for trace in traces if trace.end is None]:
            turns = [(trace, self._ids(trace)) for trace in active]
            for trace, ids in turns:
                if len(ids) >= self.options.context:
                    trace.end = "length"
            open_turns = [(trace, ids) for trace, ids in turns if trace.end is None]
            replies = self.reply([ids for _, ids in open_turns]) if open_turns else []
            for (trace, ids), new in zip(open_turns, replies, strict=True):
                self._add(trace, ids, new)
        return traces

    def _begin(self, prompt: Prompt) -> Trace:
        tools = (prompt.tools or TOOLS) if self.options.tools == "reference" and prompt.questions else ()
        offered = Prompt(prompt.place, prompt.opening, prompt.questions, prompt.results, tools, prompt.text)
        return Trace(offered, [*prompt.opening, *prompt.questions[:1]], questions=1)

    def _ids(self, trace: Trace) -> list[int]:
        if trace.prompt.text:
            return list(self.tokenizer(trace.prompt.text, verbose=False)["input_ids"])
        return self._rendered(trace, prompt=True)

    def _rendered(self, trace: Trace, *, prompt: bool) -> list[int]:
        tools = list(trace.prompt.tools) or None
        out = self.tokenizer.apply_chat_template(
            trace.messages, tools=tools, add_generation_prompt=prompt, return_dict=True
        )
        return list(out["input_ids"])

    def _add(self, trace: Trace, ids: list[int], new: list[int]) -> None:
        """Adds the model's turn to the trace, and the tool results or the next question that follow it."""
        trace.tokens += len(new)
        finished = bool(new) and new[-1] in self.end_ids
        kept = [token for token in new if token not in self.end_ids]
        text = self.tokenizer.decode(kept, clean_up_tokenization_spaces=False)
        if trace.prompt.text:
            trace.completion, trace.end = text, "answer" if finished else "length"
            return
        calls, problem = self._calls(text) if finished else ([], False)
        message = {"role": "assistant", "content": text}
        if calls:
            functions = [{"type": "function", "function": call} for call in calls]
            message = {"role": "assistant", "content": text.partition("<tool_call>")[0], "tool_calls": functions}
        trace.messages.append(message)
        trace.changed += self._rendered(trace, prompt=False)[: len(ids) + len(new)] != ids + new
        trace.turns += 1
        if not finished:
            trace.end = "length"
        elif problem or (calls and not self._execute(trace, calls)):
            trace.end = "bad call"
        elif calls:
            trace.end = "turns" if trace.turns >= self.options.turns else None
        else:
            self._next_question(trace)

    def _calls(self, text: str) -> tuple[list[dict[str, Any]], bool]:
        """The calls in a turn, and whether there is one that cannot be read; none where no tool is offered."""
        if self.options.tools == "none":
            return [], False
        try:
            return read_calls(text), False
        except ToolError:
            return [], True

    def _execute(self, trace: Trace, calls: list[dict[str, Any]]) -> bool:
        try:
            answers = [run_tool(call, trace.prompt.results[trace.questions - 1]) for call in calls]
        except ToolError:
            return False
        trace.messages += [{"role": "tool", "name": c["name"], "content": a} for c, a in zip(calls, answers)]
        return True

    def _next_question(self, trace: Trace) -> None:
        if trace.questions == len(trace.prompt.questions):
            trace.end = "answer"
            return
        trace.messages.append(trace.prompt.questions[trace.questions])
        trace.questions, trace.turns = trace.questions + 1, 0
