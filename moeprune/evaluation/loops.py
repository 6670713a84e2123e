"""How often open-ended text becomes a loop: the rule, the prompts that text is generated for, and the metrics.

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
from typing import Any

import numpy as np

from moeprune.artifacts.errors import InputError
from moeprune.data.trajectories import TokenSet
from moeprune.evaluation.decoding import end_tokens, generate
from moeprune.evaluation.intervals import share_metrics

NGRAM = 8
WINDOW = 128  # tokens at the end of an output; a loop, once entered, is not left
THRESHOLD = 0.5
SHORTEST_PROMPT = 16
PROMPTS = 32
PROMPT_TOKENS = 64
NEW_TOKENS = 256
TEMPERATURE = 0.7


@dataclass(frozen=True)
class OpenPrompt:
    """The beginning of a held-out piece."""

    domain: str
    ids: tuple[int, ...]
    end_expected: bool  # the held-out text has an end token within half of the limit


def loop_metrics(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[OpenPrompt],
    *,
    max_new_tokens: int = NEW_TOKENS,
    temperature: float = TEMPERATURE,
    seed: int = 0,
    batch_size: int = 64,
) -> dict[str, float]:
    """`generation/loop_rate`, the share of outputs that are loops, and by domain; 95 % Wilson intervals.

    Small models loop on nearly every text when they decode greedily, pruned or not, so the default samples at 0.7,
    with the same random numbers for every model.
    """
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
    return share_metrics("generation/loop_rate", looped, [prompt.domain for prompt in prompts])


def open_prompts(
    token_set: TokenSet,
    *,
    end_ids: Sequence[int],
    count: int = PROMPTS,
    prompt_tokens: int = PROMPT_TOKENS,
    max_new_tokens: int = NEW_TOKENS,
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
