"""Text from many prompts at once: left-padded batches with a KV cache, the same tokens whatever the batch."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from moeprune.artifacts.errors import InputError
from moeprune.models.device_map import device_of_inputs


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Ids that end a turn: those of the generation config and the tokenizer's, ascending.

    Raises InputError when there is none, because then no output could be called finished.
    """
    configured = model.generation_config.eos_token_id
    ids = set(configured) if isinstance(configured, list | tuple) else {configured}
    ids = {token for token in ids | {tokenizer.eos_token_id} if token is not None}
    if not ids:
        raise InputError("the model has no end token; set eos_token_id in its generation_config.json")
    return sorted(ids)


@torch.no_grad()
def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    end_ids: Sequence[int],
    temperature: float = 0.0,
    seed: int = 0,
    batch_size: int = 64,
) -> list[list[int]]:
    """The new token ids of every prompt, in order; the end token, where one came, is the last.

    Temperature 0 takes the most likely token. Above 0 the draws depend on the seed, the prompt and the step alone, so
    two models are sampled with common random numbers. What the model's generation_config asks for (sampling,
    penalties) is not applied. Prompts of similar length share a batch; its padding is masked and changes no result
    beyond rounding.
    """
    assert all(prompts), "an empty prompt"
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    out: list[list[int]] = [[] for _ in prompts]
    with _plain_generation(model):
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            batch = [prompts[index] for index in chosen]
            processors = [GumbelNoise(batch, temperature, seed)] if temperature > 0 else []
            rows = _generate(model, batch, max_new_tokens, end_ids, processors)
            for index, row in zip(chosen, rows, strict=True):
                out[index] = _until_end(row, end_ids)
    return out


class GumbelNoise:
    """Makes the arg-max of the scores a draw from softmax(scores / temperature): the Gumbel-max identity.

    Each prompt has a generator of its own, on the CPU: neither the batch nor the device enters the noise.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], temperature: float, seed: int) -> None:
        self.temperature = temperature
        self.generators = [torch.Generator().manual_seed(_prompt_seed(prompt, seed)) for prompt in prompts]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        vocabulary = scores.shape[-1]
        drawn = torch.stack([torch.empty(vocabulary).exponential_(generator=g) for g in self.generators])
        return scores.float() / self.temperature - drawn.log().to(scores.device)


def _prompt_seed(prompt: Sequence[int], seed: int) -> int:
    ids = np.asarray([seed, *prompt], dtype="<i8").tobytes()
    return int.from_bytes(hashlib.sha256(ids).digest()[:8], "little") >> 1


def _generate(
    model: Any,
    prompts: list[Sequence[int]],
    max_new_tokens: int,
    end_ids: Sequence[int],
    processors: list[GumbelNoise],
) -> list[list[int]]:
    from transformers import GenerationConfig

    width = max(len(prompt) for prompt in prompts)
    input_ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
        attention_mask[row, width - len(prompt) :] = 1
    tokens = model.generate(
        input_ids=input_ids.to(device_of_inputs(model)),
        attention_mask=attention_mask.to(device_of_inputs(model)),
        generation_config=GenerationConfig(
            max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=list(end_ids), pad_token_id=end_ids[0]
        ),
        logits_processor=processors,
    )
    return tokens[:, width:].tolist()


def _until_end(row: list[int], end_ids: Sequence[int]) -> list[int]:
    for position, token in enumerate(row):
        if token in end_ids:
            return row[: position + 1]
    return row


@contextmanager
def _plain_generation(model: Any) -> Iterator[None]:
    """`model` without its own generation config, whose penalties and token bans would enter every `generate`."""
    from transformers import GenerationConfig

    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own
