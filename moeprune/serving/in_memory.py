"""The pruned model in memory on an engine's tokens: their log-probabilities and those of its own choices."""

from collections.abc import Sequence
from typing import Any

from moeprune.serving.answers import Answer, Score


def score(model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Answer]) -> list[Score]:
    """One score a prompt; `model` is a transformers causal language model in eval mode.

    Position by position along prompt and answer in one forward each, without a cache and without padding: as plain as
    it gets. What was generated last needs no forward of its own.
    """
    import torch

    scores = []
    with torch.no_grad():
        for prompt, answer in zip(prompts, answers, strict=True):
            if not answer.tokens:
                scores.append(Score((), ()))
                continue
            ids = torch.tensor([[*prompt, *answer.tokens[:-1]]], device=model.device)
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 :].double()
            likely = torch.log_softmax(logits, dim=-1)
            chosen = likely.gather(1, torch.tensor(answer.tokens, device=model.device)[:, None])[:, 0]
            scores.append(Score(tuple(chosen.tolist()), tuple(likely.max(dim=-1).values.tolist())))
    return scores
