"""Llama 4: every expert is called with every token, scaled by its gate before it goes in: the block adds f_e(g x).

The gate is sigmoid of the logit for the chosen experts and 0 for the others, which so put out 0. To be of one kind with
other families the output is taken as f = f_e(g x) / g, so that g f is what the block adds; it has been computed anyway.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from moeprune.models.layers import MoELayer

CHUNK_BYTES = 8 * 2**20  # of expert outputs gathered at a time


@contextmanager
def expanded(layer: MoELayer, observer: Callable[..., None]) -> Iterator[Callable[..., torch.Tensor]]:
    """A forward of the layer's experts that gives what their own gives and reports to `observer`."""
    forward = layer.experts.forward
    scores: list[torch.Tensor] = []

    def routed(module: torch.nn.Module, args: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        scores[:] = output[:1]

    def recorded(hidden: torch.Tensor) -> torch.Tensor:
        whole: torch.Tensor = forward(hidden)
        gates, index = scores[0].topk(layer.info.top_k, dim=1)
        by_token = whole.view(layer.info.num_experts, len(gates), -1)  # (experts, tokens, hidden)
        step = max(1, CHUNK_BYTES // (layer.info.top_k * whole.shape[-1] * whole.element_size()))
        for start in range(0, len(gates), step):
            rows = slice(start, start + step)
            tokens = torch.arange(len(gates), device=index.device)[rows].unsqueeze(1)
            gated = by_token[index[rows], tokens]  # (tokens, k, hidden)
            gate = gates[rows].unsqueeze(2).to(gated.dtype)
            outputs = torch.where(gate > 0, gated / gate, torch.zeros_like(gated))
            observer(layer, rows, index[rows], gates[rows], outputs)
        return whole

    handle = layer.router.register_forward_hook(routed)
    recorded.unobserved = forward  # type: ignore[attr-defined]
    try:
        yield recorded
    finally:
        handle.remove()
