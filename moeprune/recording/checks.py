"""Self-checks of a recording, always on: the parts rebuild the block, and no routed slot is lost."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from moeprune.models.layers import MoELayer
from moeprune.recording.accumulate import LayerSums
from moeprune.recording.hooks import slot_outputs, unobserved, weighted_sum

# Relative to the largest entry. float32: reordered sums; half precision: one more rounding of every slot.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9, torch.bfloat16: 3e-2, torch.float16: 5e-3}


class RecordingError(RuntimeError):
    """What was seen cannot be what the model computed; recording on would give wrong statistics."""


@contextmanager
def rebuilt(layers: Sequence[MoELayer]) -> Iterator[None]:
    """Inside, every block's output must equal sum_k g_k f_k plus what the block gives when its experts give zero.

    That proves, whatever the family, that the recorded gates are the coefficients the model multiplies with. Raises
    RecordingError naming the layer, the difference and the implementation of the experts.
    """
    handles = [layer.block.register_forward_hook(_compare(layer), with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _compare(layer: MoELayer) -> Callable[..., None]:
    def compare(block: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen: list[torch.Tensor] = []
        original = unobserved(layer)

        def zero(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            outputs = slot_outputs(original, hidden, index, weights)
            seen.append(weighted_sum(outputs, weights))
            return torch.zeros_like(hidden)

        own = layer.experts.__dict__.get("forward")
        layer.experts.forward = zero
        try:
            rest = block.forward(*args, **kwargs)
        finally:
            if own is None:
                del layer.experts.forward
            else:
                layer.experts.forward = own
        if not seen:
            raise RecordingError(
                f"{layer.name}: the block never called its experts; another implementation bypasses them"
            )
        whole, rest = (part[0] if isinstance(part, tuple) else part for part in (output, rest))
        parts = seen[0].reshape(whole.shape).float() + rest.float()
        difference = (whole.float() - parts).abs().max().item()
        limit = TOLERANCE[whole.dtype] * max(whole.abs().max().item(), 1e-30)
        if not difference <= limit:
            raise RecordingError(
                f"{layer.name}: sum of gate x expert output (+ shared path) differs from the block's output by "
                f"{difference:.3g} (limit {limit:.3g}); the routing of this model is not understood, please report it"
            )

    return compare


def check_conservation(layers: Sequence[MoELayer], sums: Sequence[LayerSums], tokens: int) -> None:
    """Every layer saw every counted token, and sum(N_e) == tokens x top_k. Raises RecordingError naming the layer."""
    for layer, total in zip(layers, sums, strict=True):
        experts = total.num_experts
        slots = int(total.co_count.view(experts, experts).diagonal().sum())
        if int(total.tokens) != tokens or slots != tokens * layer.info.top_k:
            raise RecordingError(
                f"{layer.name}: recorded {slots} routed slots of {int(total.tokens)} tokens, expected "
                f"{tokens * layer.info.top_k} of {tokens} (top_k {layer.info.top_k}); the experts' implementation "
                f"({type(layer.experts).__name__}) bypassed the recorder"
            )
