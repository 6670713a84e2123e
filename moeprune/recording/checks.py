"""Self-checks of a recording, always on: the parts rebuild the block, and no routed slot is lost."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from moeprune.models.layers import MoELayer, forward_replaced
from moeprune.recording.accumulate import LayerSums
from moeprune.recording.hooks import observed, unobserved, weighted_sum

# Relative to the largest entry. float32: reordered sums; half precision: one more rounding of every slot.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9, torch.bfloat16: 3e-2, torch.float16: 5e-3}


class RecordingError(RuntimeError):
    """What was seen cannot be what the model computed; recording on would give wrong statistics."""


@contextmanager
def rebuilt(layers: Sequence[MoELayer]) -> Iterator[None]:
    """Inside, every block's output must equal sum_k g_k f_k plus what the block gives when its experts give zero.

    That proves, whatever the family, that the recorded gates are the coefficients the model multiplies with. Where a
    norm follows the sum, its input is compared; where experts lie in no block, what they give themselves. Raises
    RecordingError naming the layer and the difference.
    """
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(_compared(layer))
        yield


class _Added:
    """What the recorded slots of one call of the experts add up to (tokens, hidden): of experts, and of the others."""

    def __init__(self) -> None:
        self.experts: list[torch.Tensor] = []
        self.others: list[torch.Tensor] = []

    def __call__(self, layer: MoELayer, rows: slice, *seen: torch.Tensor) -> None:
        index, gates, outputs = seen
        nobodys = index == layer.info.num_experts
        self.experts.append(weighted_sum(outputs, gates.masked_fill(nobodys, 0)))
        self.others.append(weighted_sum(outputs, gates.masked_fill(~nobodys, 0)))

    def of_experts(self, like: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.experts).float().reshape(like.shape)


@contextmanager
def _compared(layer: MoELayer) -> Iterator[None]:
    """Inside, every call of the layer is compared with its parts."""
    norm = getattr(layer.block, layer.family.normalised_by) if layer.family.normalised_by else None
    sums: list[torch.Tensor] = []  # what goes into the norm

    def heard(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        sums[:] = args[:1]

    def block_called(block: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        whole = _first(output) if norm is None else sums[0]
        added = _Added()
        with _without_experts(layer, added):
            rest = _first(block.forward(*args, **kwargs))
        if not added.experts:
            raise RecordingError(
                f"{layer.name}: the block never called its experts; another implementation bypasses them"
            )
        rest = rest if norm is None else sums[0]
        _require_equal(layer, whole, layer.info.post_scale * added.of_experts(whole) + rest.float())

    def experts_called(experts: torch.nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        added = _Added()
        with forward_replaced(layer.experts, unobserved(layer)), observed([layer], added):
            layer.experts.forward(*args)
        _require_equal(layer, unobserved(layer)(*args), added.of_experts(output))

    if layer.family.bare:
        handles = [layer.experts.register_forward_hook(experts_called)]
    else:
        handles = [layer.block.register_forward_hook(block_called, with_kwargs=True)]
    if norm is not None:
        handles.append(norm.register_forward_pre_hook(heard))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _without_experts(layer: MoELayer, added: _Added) -> Iterator[None]:
    """Inside, calls of the experts are reported to `added` and give what slots that go to no expert give."""
    with forward_replaced(layer.experts, unobserved(layer)), observed([layer], added):
        whole = layer.experts.forward

        def rest(*args: torch.Tensor) -> torch.Tensor:
            result = whole(*args)
            return torch.cat(added.others).view(result.shape) if layer.info.null_slots else torch.zeros_like(result)

        with forward_replaced(layer.experts, rest):
            yield


def _first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def _require_equal(layer: MoELayer, whole: torch.Tensor, parts: torch.Tensor) -> None:
    difference = (whole.float() - parts).abs().max().item()
    limit = TOLERANCE[whole.dtype] * max(whole.abs().max().item(), 1e-30)
    if not difference <= limit:
        raise RecordingError(
            f"{layer.name}: sum of gate x expert output (+ shared path) differs from the block's output by "
            f"{difference:.3g} (limit {limit:.3g}); the routing of this model is not understood, please report it"
        )


def check_conservation(layers: Sequence[MoELayer], sums: Sequence[LayerSums], tokens: int) -> None:
    """Every layer saw every counted token, and sum(N_e) == tokens x top_k. Raises RecordingError naming the layer."""
    for layer, total in zip(layers, sums, strict=True):
        experts = total.num_experts
        slots = int(total.co_count.view(experts, experts).diagonal().sum()) + int(total.null_slots)
        if int(total.tokens) != tokens or slots != tokens * layer.info.top_k:
            raise RecordingError(
                f"{layer.name}: recorded {slots} routed slots of {int(total.tokens)} tokens, expected "
                f"{tokens * layer.info.top_k} of {tokens} (top_k {layer.info.top_k}); the experts' implementation "
                f"({type(layer.experts).__name__}) bypassed the recorder"
            )
