"""Messages -> tokens by the model's own chat template, with the author of each token."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from moeprune.artifacts.errors import InputError
from moeprune.data import masks
from moeprune.data.options import Count
from moeprune.data.readers import RecordProblem
from moeprune.data.records import Record

MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
PLAIN_TEMPLATE = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}\n\n{% endfor %}"
PROBE = "moeprune_probe_{}_call"


@dataclass(frozen=True)
class Encoded:
    """A whole trajectory in tokens."""

    ids: np.ndarray  # (tokens,) int32
    # (tokens,) words: system, user, assistant, tool, template, text, prompt, completion, ids, unknown
    roles: np.ndarray
    counted: np.ndarray  # (tokens,) bool
    turns: tuple[tuple[str, int, int], ...] = ()  # role, first and last + 1 token of assistant and tool turns
    changes: Mapping[str, int] = field(default_factory=dict)

    @property
    def trajectory(self) -> str:
        """sha256 of the ids as little-endian int64: the identity of a trajectory."""
        return hashlib.sha256(self.ids.astype("<i8").tobytes()).hexdigest()


@dataclass(frozen=True)
class Chats:
    """The chat rendering of one tokenizer."""

    tokenizer: Any
    plain: bool = False  # "role: content" lines in place of the model's template

    def template(self, record: Record) -> str:
        """The text of the template. Raises InputError for a model that has none."""
        if self.plain:
            return PLAIN_TEMPLATE
        if not getattr(self.tokenizer, "chat_template", None):
            raise InputError(
                f"{record.place}: the tokenizer has no chat template for `messages`; take that of the instruct model, "
                'or set calibration.template=plain for "role: content" lines (they cannot show tool calls)'
            )
        text: str = self.tokenizer.get_chat_template(None, _listed(record.tools))
        return text

    def marked(self, record: Record) -> bool:
        """Whether the template itself says which words are the model's."""
        return bool(MARKERS.search(self.template(record)))

    def apply(self, record: Record, messages: Sequence[dict[str, Any]], **options: Any) -> Any:
        """apply_chat_template of messages with the record's tools. Raises RecordProblem when the template refuses."""
        from jinja2 import TemplateError

        template = self.template(record)
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tools=_listed(record.tools), chat_template=template, **options
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            what = f"cannot be rendered by the chat template ({error})"
            raise RecordProblem("template refused", "messages", what) from error

    def encode(self, record: Record, *, count: Count) -> Encoded:
        """Ids equal to apply_chat_template(tokenize=True), roles and counted tokens.

        Raises RecordProblem for a record that the template refuses or whose roles it hides, InputError when the
        template drops a tool call.
        """
        record, text, changes = self._rendered(record)
        check_calls(self, record)
        if not self.tokenizer.is_fast:
            return self._without_offsets(record, count)
        marked = self.marked(record)
        out = self.apply(
            record,
            record.messages,
            return_dict=True,
            return_assistant_tokens_mask=marked,
            tokenizer_kwargs={"return_offsets_mapping": True, "verbose": False},
        )
        offsets = np.asarray(out["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        written = np.asarray(out["assistant_masks"], dtype=bool) if marked else None
        view = _View(self, record, text, offsets=offsets, written=written)
        return Encoded(
            ids=np.asarray(out["input_ids"], dtype=np.int32),
            roles=view.roles(),
            counted=view.counted(count),
            turns=view.turns(),
            changes=changes | view.findings(),
        )

    def _rendered(self, record: Record) -> tuple[Record, str, dict[str, int]]:
        """The record as the template takes it, its text, and what had to change.

        Some templates join tool arguments to text and refuse objects: they get JSON text, the same for a record
        that had an object and for one that had text.
        """
        try:
            return record, self.apply(record, record.messages, tokenize=False), {}
        except RecordProblem as problem:
            written = replace(record, messages=tuple(map(_arguments_as_text, record.messages)))
            if written.messages == record.messages:
                raise
            try:
                text = self.apply(written, written.messages, tokenize=False)
            except RecordProblem:
                raise problem from None
            return written, text, {"arguments as text for the template": 1}

    def _without_offsets(self, record: Record, count: Count) -> Encoded:
        if count != "all":
            raise InputError(f"{record.place}: count={count} needs a fast tokenizer; this one does not tell positions")
        ids = np.asarray(self.apply(record, record.messages, return_dict=True)["input_ids"], dtype=np.int32)
        return Encoded(ids, np.full(len(ids), masks.UNKNOWN, dtype=object), np.ones(len(ids), dtype=bool))


def _listed(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    return None if tools is None else list(tools)


class _View:
    """One rendered record as spans, each with its author."""

    def __init__(
        self, chats: Chats, record: Record, text: str, *, offsets: np.ndarray, written: np.ndarray | None
    ) -> None:
        """`written` (tokens,): the template's own mask of what the model writes, None for a template without one."""

        def render(messages: Sequence[dict[str, Any]], prompt: bool) -> str | None:
            try:
                rendered: str = chats.apply(record, messages, tokenize=False, add_generation_prompt=prompt)
            except RecordProblem:
                return None
            return rendered

        questions = (index for index, message in enumerate(record.messages) if message["role"] == "user")
        answer_from = record.completion_from
        self.answer_from = max(questions, default=-1) + 1 if answer_from is None else answer_from
        self.spans = masks.role_spans(
            render, record.messages, text=text, header=masks.generation_prompt(render), cut=self.answer_from
        )
        self.offsets, self.marked = offsets, written is not None
        self.known = not any(span.role == masks.UNKNOWN for span in self.spans)
        self.written = self._tokens("assistant") if written is None else written

    def _tokens(self, role: str, *, since: int = 0) -> np.ndarray:
        """Tokens (tokens,) bool of the spans of `role` that begin at message `since` or later."""
        inside = np.zeros(len(self.offsets), dtype=bool)
        for span in self.spans:
            if span.role == role and span.first >= since:
                inside[masks.covered(self.offsets, span.start, span.end)] = True
        return inside

    def roles(self) -> np.ndarray:
        roles = masks.token_roles(self.offsets, self.spans)
        roles[(roles == "assistant") & ~self.written] = masks.TEMPLATE
        roles[self.written] = "assistant"
        return roles

    def turns(self) -> tuple[tuple[str, int, int], ...]:
        """Role, first and last + 1 token of every turn of the assistant and of tools."""
        spans = [span for span in self.spans if span.role in ("assistant", "tool")]
        tokens = [masks.covered(self.offsets, span.start, span.end) for span in spans]
        return tuple((span.role, token.start, token.stop) for span, token in zip(spans, tokens))

    def counted(self, count: Count) -> np.ndarray:
        """The mask (tokens,) of `count`. Raises RecordProblem when the template does not show who wrote what."""
        if count == "all":
            return np.ones(len(self.offsets), dtype=bool)
        if not self.known and not (count == "assistant" and self.marked):
            what = f"are rewritten by the template, so that count={count} cannot be told; set count=all"
            raise RecordProblem("roles unknown", "messages", what)
        if count == "completion":
            return self.written & self._tokens("assistant", since=self.answer_from)
        return self.written if count == "assistant" else self._tokens("tool")

    def findings(self) -> dict[str, int]:
        """Counts of what this rendering hides or drops."""
        findings = {} if self.known else {"roles unknown": 1}
        silent = ("assistant", masks.TEMPLATE)  # a turn may be nothing but its announcement
        dropped = sum(
            span.last - span.first for span in self.spans if span.start == span.end and span.role not in silent
        )
        return findings | {"messages dropped by the template": dropped} if dropped else findings


def _arguments_as_text(message: dict[str, Any]) -> dict[str, Any]:
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or call
        written = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
        calls.append({**call, "function": written} if call.get("function") else written)
    return {**message, "tool_calls": calls} if calls else message


def check_calls(chats: Chats, record: Record) -> None:
    """Raises InputError unless the template shows every tool call: a probe in each call's name must come out."""
    probes: list[str] = []

    def probed(call: dict[str, Any]) -> dict[str, Any]:
        probes.append(PROBE.format(len(probes)))
        if call.get("function"):
            return {**call, "function": {**call["function"], "name": probes[-1]}}
        return {**call, "name": probes[-1]}

    calls = [call for message in record.messages for call in message.get("tool_calls") or ()]
    if not calls:
        return
    messages = [
        {**message, "tool_calls": [probed(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in record.messages
    ]
    shown = chats.apply(record, messages, tokenize=False)
    lost = [call for call, probe in zip(calls, probes) if probe not in shown]
    if lost:
        rendering = "plain rendering" if chats.plain else "chat template"
        raise InputError(
            f"{record.place}: the {rendering} drops {len(lost)} of {len(calls)} tool calls, first "
            f"{json.dumps(lost[0], default=str)[:120]}; use a template that renders tool_calls"
        )
