"""A model with only the kept experts, in memory: `with pruned(model, plan): ...`; afterwards it is as it was."""

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from moeprune.artifacts.plan import PrunePlan
from moeprune.models.layers import MoELayer, find_moe_layers, model_fingerprint

# Attributes that hold the number of routed experts and are read in a forward pass.
COUNT_ATTRIBUTES = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class PrunedModel:
    """Slices of every tensor with an expert axis, made once; entering and leaving swaps pointers, any number of times.

    While it is open the model behaves exactly like the exported checkpoint: the router has rows for the kept experts
    only, so its softmax, groups and renormalisation run over those (the sliced semantics, not a mask).
    """

    def __init__(self, layers: Sequence[MoELayer], plan: PrunePlan) -> None:
        self._swaps = [swap for layer in layers for swap in _swaps(layer, plan.kept[layer.name])]
        self._open = False

    def __enter__(self) -> "PrunedModel":
        assert not self._open, "the same pruned model is entered twice"
        self._swap()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._swap()

    def _swap(self) -> None:
        for position, (store, name, other) in enumerate(self._swaps):
            current = store[name]
            store[name] = other
            self._swaps[position] = (store, name, current)
        self._open = not self._open


def pruned(model: nn.Module, plan: PrunePlan) -> PrunedModel:
    """A context manager inside which `model` has only the experts the plan keeps.

    Raises InputError when the plan was made for another model.
    """
    layers = find_moe_layers(model)
    plan.require_model(model_fingerprint(model, layers), "model")
    plan.require_layers([layer.info for layer in layers], "model")
    return PrunedModel(layers, plan)


def _swaps(layer: MoELayer, kept: Sequence[int]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """(store, name, value inside the context) for every tensor and count of one layer."""
    count = layer.info.num_experts
    for module in _expert_modules(layer):
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                axis = None if tensor is None else expert_axis(tensor, count)
                if tensor is not None and axis is not None:
                    ids = torch.tensor(kept, device=tensor.device)
                    sliced = tensor.detach().index_select(axis, ids)
                    yield (
                        store,
                        name,
                        nn.Parameter(sliced, requires_grad=False) if store is module._parameters else sliced,
                    )
        for name in COUNT_ATTRIBUTES:
            if module.__dict__.get(name) == count:
                yield module.__dict__, name, len(kept)


def _expert_modules(layer: MoELayer) -> Iterator[nn.Module]:
    """The block itself (not its shared experts), the router and the experts with their submodules."""
    yield layer.block
    yield from layer.router.modules()
    yield from layer.experts.modules()


def expert_axis(tensor: torch.Tensor, num_experts: int) -> int | None:
    """The axis that runs over experts: the first, or the second of a (1, experts) row; None when there is none."""
    if tensor.ndim >= 1 and tensor.shape[0] == num_experts:
        return 0
    if tensor.ndim == 2 and tensor.shape[0] == 1 and tensor.shape[1] == num_experts:
        return 1
    return None
