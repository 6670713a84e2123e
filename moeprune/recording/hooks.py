"""Report every expert's output and gate while the model runs its own forward; nothing is computed twice.

transformers 5 gives nearly all families one contract, `experts.forward(hidden, top_k_index, top_k_weights)`. Each
token is expanded to its k slots and the family's own forward is called once with one slot of weight 1 per row, so the
result is f_e(t) for every routed pair. The block continues with the weighted sum of the slots. What a family does
otherwise is in its row of models.families.

Llama 4 calls every expert with every token, scaled by its gate before it goes in: the block adds f_e(g x). The gate is
the sigmoid of the logit for the chosen experts and 0 for the others, whose output is then 0. To record the same
quantity as for other families the output is taken as f = f_e(g x) / g, so that g f is what the block adds.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from einops import rearrange
from torch.nn.functional import linear

from moeprune.models.device_map import is_away
from moeprune.models.layers import MoELayer, forward_replaced, projection
from moeprune.models.memory import keep_freed_memory

ROW_BLOCK = 4  # rows that a float32 matrix product on CPU works on at a time
CHUNK_BYTES = 8 * 2**20  # of expert outputs held at a time on CPU: they stay in the cache until they are summed
ROWS_AN_EXPERT = 64  # and no fewer on average, or the matrix products get slow

# (layer, which rows of the call, expert ids (rows, k), gates (rows, k), outputs before the gate (rows, k, hidden)).
# The id of a slot that goes to no expert is the number of experts.
Observer = Callable[[MoELayer, slice, torch.Tensor, torch.Tensor, torch.Tensor], None]


@contextmanager
def observed(layers: Sequence[MoELayer], observer: Observer) -> Iterator[None]:
    """Inside, every call of a layer's experts reports to `observer`, chunk by chunk; afterwards nothing is left."""
    keep_freed_memory()
    with ExitStack() as stack:
        for layer in layers:
            wrapped = _input_gated if layer.info.gates_input else _expanded
            recorded = stack.enter_context(wrapped(layer, observer))
            stack.enter_context(forward_replaced(layer.experts, recorded))
        yield


@contextmanager
def _expanded(layer: MoELayer, observer: Observer) -> Iterator[Callable[..., torch.Tensor]]:
    """A forward of the layer's experts with the same result as their own, which reports to `observer`."""
    forward = layer.experts.forward

    def recorded(hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        result = torch.empty_like(flat)
        for rows in _chunks(layer, flat):
            index, weights = top_k_index[rows], top_k_weights[rows]
            outputs = slot_outputs(layer, forward, flat[rows], index)
            result[rows] = weighted_sum(outputs, weights)
            observer(layer, rows, routed_ids(layer, index, weights), weights, in_hidden_size(layer, outputs))
        return result.view(hidden.shape)

    recorded.unobserved = forward  # type: ignore[attr-defined]
    yield recorded


@contextmanager
def _input_gated(layer: MoELayer, observer: Observer) -> Iterator[Callable[..., torch.Tensor]]:
    """The same for experts that are called with every token and scale it by its gate first."""
    forward = layer.experts.forward
    scores: list[torch.Tensor] = []

    def routed(module: torch.nn.Module, args: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        scores[:] = output[:1]

    def recorded(hidden: torch.Tensor) -> torch.Tensor:
        whole: torch.Tensor = forward(hidden)
        gates, index = scores[0].topk(layer.info.top_k, dim=1)
        every = rearrange(whole, "(experts tokens) hidden -> experts tokens hidden", tokens=len(gates))
        step = max(1, CHUNK_BYTES // (layer.info.top_k * whole.shape[-1] * whole.element_size()))
        for start in range(0, len(gates), step):
            rows = slice(start, start + step)
            tokens = torch.arange(len(gates), device=index.device)[rows].unsqueeze(1)
            gated = every[index[rows], tokens]  # (tokens, k, hidden)
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


def routed_ids(layer: MoELayer, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The expert id of every slot (tokens, k); the number of experts for a slot that goes to none."""
    kind, nobody = layer.family.null_slots, layer.info.num_experts
    if kind == "classes":
        return index.clamp(max=nobody)
    return index.masked_fill(weights == 0, nobody) if kind == "zero_gates" else index


def in_hidden_size(layer: MoELayer, outputs: torch.Tensor) -> torch.Tensor:
    """Expert outputs (..., width) as the block adds them up (..., hidden), without the bias of the projection."""
    matrix = projection(layer)
    return outputs if matrix is None else linear(outputs, matrix)


def unobserved(layer: MoELayer) -> Callable[..., torch.Tensor]:
    """The experts' own forward, also while `observed` is open."""
    return getattr(layer.experts.forward, "unobserved", layer.experts.forward)


def slot_outputs(
    layer: MoELayer, forward: Callable[..., torch.Tensor], hidden: torch.Tensor, index: torch.Tensor
) -> torch.Tensor:
    """f_e(t) before the gate (tokens, k, width) for every routed slot, from one call of the experts' own forward."""
    top_k = index.shape[1]
    slots = index.reshape(-1)
    fill = _filling(slots)
    rows = hidden.new_empty((len(slots) + len(fill), hidden.shape[-1]))
    rows[len(slots) :] = 0
    copies = rearrange(rows[: len(slots)], "(tokens k) hidden -> tokens k hidden", k=top_k)
    copies.copy_(rearrange(hidden, "tokens hidden -> tokens 1 hidden"))
    ids = torch.cat([slots, fill]).unsqueeze(1)
    gates = torch.ones_like(ids, dtype=hidden.dtype)
    if not layer.family.single_slots:  # a second slot of weight 0, to a class that is no expert where there is one
        other = torch.full_like(ids, layer.info.num_experts if layer.extra else 0)
        ids, gates = torch.cat([ids, other], dim=1), torch.cat([gates, torch.zeros_like(gates)], dim=1)
    outputs = forward(rows, ids, gates)
    return rearrange(outputs.reshape(len(rows), -1)[: len(slots)], "(tokens k) width -> tokens k width", k=top_k)


def _chunks(layer: MoELayer, hidden: torch.Tensor) -> list[slice]:
    """The rows of a call in pieces whose expert outputs fit into a CPU's cache; one piece on other devices, and where
    every call brings the weights first."""
    rows = len(hidden)
    if hidden.device.type == "cpu" and not is_away(layer.experts):
        top_k, width = layer.info.top_k, hidden.shape[-1] * hidden.element_size()
        rows = max(CHUNK_BYTES // (top_k * width), ROWS_AN_EXPERT * layer.info.num_experts // top_k)
    return [slice(start, start + rows) for start in range(0, len(hidden), rows)]


def _filling(slots: torch.Tensor) -> torch.Tensor:
    """Expert ids of rows to add on CPU so that every expert that is used at all gets a multiple of ROW_BLOCK rows.

    A matrix product takes another path, with other rounding, for last rows that are no full block: a token's output
    would depend on how many others its expert got in the batch, and a near tie in the next router could fall to the
    other side. GPUs pick kernels by shape anyway, so nothing is added there.
    """
    if slots.device.type != "cpu":
        return slots[:0]
    counts = torch.bincount(slots)
    return torch.arange(len(counts)).repeat_interleave((-counts) % ROW_BLOCK)


def weighted_sum(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """sum_k g_k f_k (tokens, hidden)."""
    # One batched product reads the outputs once; multiply-then-sum is ten times slower on CPU.
    return torch.bmm(weights.unsqueeze(1).to(outputs.dtype), outputs).squeeze(1)
