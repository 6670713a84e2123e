"""Which tokens count: who wrote each token of a rendered chat.

A template with generation markers says itself what the model writes. Any other template is asked by rendering the
first k messages for every k: where that is a beginning of the whole text, it ends where message k begins. Templates
that rewrite the past (reasoning dropped from earlier turns) are asked again with a user message behind. Where neither
gives an answer the span stays UNKNOWN and is never guessed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np

UNKNOWN = "unknown"
TEMPLATE = "template"  # what announces an assistant turn: the model does not write it
# (messages, with generation prompt) -> text; None where the template refuses
Render = Callable[[Sequence[dict[str, Any]], bool], str | None]


@dataclass(frozen=True)
class Span:
    """Characters start .. end - 1 of the rendered text, written by `role` in messages first .. last - 1."""

    start: int
    end: int
    role: str
    first: int
    last: int


def role_spans(
    render: Render, messages: Sequence[dict[str, Any]], *, text: str, header: str, cut: int | None = None
) -> list[Span]:
    """The spans of the runs of messages with one role, in order; together they cover `text`.

    `header` is the template's generation prompt. Every assistant message is a run of its own.

    Runs whose border the template does not show are one span of role UNKNOWN. `cut` is a message index at which
    a run ends in any case. What a template writes before the first message belongs to that message.
    """
    roles = [message["role"] for message in messages]
    starts = [i for i, role in enumerate(roles) if i in (0, cut) or role != roles[i - 1] or role == "assistant"]
    ends = [*starts[1:], len(messages)]
    spans: list[Span] = []
    open_runs, begin = 0, 0
    for index, end in enumerate(ends):
        open_runs += 1
        position = len(text) if end == len(messages) else _border(render, messages[:end], text)
        if position is None or position < begin:
            continue
        first = starts[index + 1 - open_runs]
        role = roles[first] if len(set(roles[first:end])) == 1 else UNKNOWN
        spans.append(Span(begin, position, role, first, end))
        open_runs, begin = 0, position
    return _without_headers(header, text, spans)


def _border(render: Render, before: Sequence[dict[str, Any]], text: str) -> int | None:
    """Where the text of `before` ends inside `text`, or None."""
    alone = render(before, False)
    if alone is not None and text.startswith(alone):
        return len(alone)
    later = {"role": "user", "content": "x"}
    once, twice = render([*before, later], False), render([*before, later, later], False)
    if once is None or twice is None:
        return None
    border = 2 * len(once) - len(twice)
    return border if border > 0 and text.startswith(once[:border]) else None


def _without_headers(header: str, text: str, spans: list[Span]) -> list[Span]:
    """The spans with the announcement of every assistant turn split off as TEMPLATE."""
    cut: list[Span] = []
    for span in spans:
        if span.role == "assistant":
            begin = span.start + _common(header, text[span.start : span.end])
            cut.append(Span(span.start, begin, TEMPLATE, span.first, span.last))
            span = Span(begin, span.end, "assistant", span.first, span.last)
        cut.append(span)
    return cut


def _common(one: str, other: str) -> int:
    """The length of the common beginning of both."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))


def generation_prompt(render: Render) -> str:
    """What the template writes when it asks the model for a turn; "" when it has nothing like it."""
    question = [{"role": "user", "content": "x"}]
    chat, prompt = render(question, False), render(question, True)
    if chat is None or prompt is None or not prompt.startswith(chat):
        return ""
    return prompt[len(chat) :]


def covered(offsets: np.ndarray, start: int, end: int) -> slice:
    """The tokens that overlap characters start .. end - 1; offsets (tokens, 2) are in order."""
    first = int(np.searchsorted(offsets[:, 1], start, side="right"))
    last = int(np.searchsorted(offsets[:, 0], end, side="left"))
    return slice(first, max(first, last))


def token_roles(offsets: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """The role of every token (tokens,) as text; a token over a border belongs to the span it begins in."""
    roles = np.full(len(offsets), UNKNOWN, dtype=object)
    for span in spans:
        if span.end > span.start:
            first = int(np.searchsorted(offsets[:, 0], span.start, side="left"))
            last = int(np.searchsorted(offsets[:, 0], span.end, side="left"))
            roles[first:last] = span.role
    return roles
