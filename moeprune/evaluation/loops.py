"""When generated text is a loop: the rule, and the open-ended prompts it is tried on. Pure functions on token ids.

An output loops when one of these holds (the faults that users of pruned models report):
- repetition: of the n-grams (n = 8) in its last 128 tokens more than half are repeats of earlier ones there
  (the measure of arXiv:1908.04319 on a window; held-out text of every reference domain stays below it);
- no end: it reaches the limit without an end token, although the held-out text it continues has one in its first
  half. Plain text never ends within the limit, so there the rule asks for nothing;
- open reasoning: it ends while a <think> is still open.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moeprune.artifacts.errors import InputError
from moeprune.data.trajectories import TokenSet

NGRAM = 8
WINDOW = 128  # tokens at the end of an output; a loop, once entered, is not left
THRESHOLD = 0.5
SHORTEST_PROMPT = 16


@dataclass(frozen=True)
class OpenPrompt:
    """The beginning of a held-out piece."""

    domain: str
    ids: tuple[int, ...]
    end_expected: bool  # the held-out text has an end token within half of the limit


def open_prompts(
    token_set: TokenSet, *, count: int, prompt_tokens: int, max_new_tokens: int, end_ids: Sequence[int]
) -> list[OpenPrompt]:
    """`count` prompts spread evenly over the domains, the same ones whatever the order of the data.

    A prompt is the first `prompt_tokens` of a piece, or its first half where that is shorter.
    Raises InputError when no piece is long enough.
    """
    by_domain: dict[str, dict[tuple[int, ...], OpenPrompt]] = {}
    for sequence in token_set.sequences:
        length = min(prompt_tokens, len(sequence.ids) // 2)
        if length < SHORTEST_PROMPT:
            continue
        ids = tuple(int(token) for token in sequence.ids[:length])
        following = sequence.ids[length : length + max_new_tokens // 2]
        prompt = OpenPrompt(sequence.domain, ids, bool(np.isin(following, end_ids).any()))
        by_domain.setdefault(sequence.domain, {})[ids] = prompt
    if not by_domain:
        raise InputError(
            f"evaluation.loops: no held-out piece has {2 * SHORTEST_PROMPT} tokens, half of them to continue from; "
            "give longer trajectories"
        )
    queues = [
        sorted(prompts.values(), key=lambda prompt: _digest(prompt.ids)) for _, prompts in sorted(by_domain.items())
    ]
    chosen: list[OpenPrompt] = []
    for turn in range(max(map(len, queues))):
        chosen += [queue[turn] for queue in queues if turn < len(queue)]
    return chosen[:count]


def loops(output: Sequence[int], text: str, *, prompt: OpenPrompt, end_ids: Sequence[int]) -> bool:
    """Whether an output is a loop by the rules above; `text` is the prompt and the output as text."""
    ended = bool(output) and output[-1] in end_ids
    if repetition(output) > THRESHOLD:
        return True
    if not ended:
        return prompt.end_expected
    return text.count("<think>") > text.count("</think>")


def repetition(tokens: Sequence[int], *, n: int = NGRAM, window: int = WINDOW) -> float:
    """Share of n-grams in the last `window` tokens that occurred before in it; 0 for fewer than n + 1 tokens."""
    tail = tuple(tokens[-window:])
    grams = [tail[start : start + n] for start in range(len(tail) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _digest(ids: Sequence[int]) -> bytes:
    return hashlib.sha256(np.asarray(ids, dtype="<i8").tobytes()).digest()
