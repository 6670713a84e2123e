"""A model with only the kept experts, in memory: `with pruned(model, plan): ...`; afterwards it is as it was.

Tables that list the experts of every token id (DeepSeek-V4's hash layers), after pruning.

Such a layer does not choose by score, so no expert is the next best one. A removed expert of a token is replaced by a
kept one that the token does not have yet, found by walking the kept experts in turn from a place that depends on the
token id and the removed expert: what a removed expert did is spread evenly over the others.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import nn

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.plan import PrunePlan
from moeprune.models.device_map import Changed, waiting_weights
from moeprune.models.family import COUNT_KEYS
from moeprune.models.layers import MoELayer, find_moe_layers, model_fingerprint


def remapped(table: torch.Tensor, kept: Sequence[int], num_experts: int) -> torch.Tensor:
    """The table (tokens, k) with the new numbers of the kept experts, ascending in `kept`, in the same type.

    With all experts kept in another order the table only follows them.
    """
    count = len(kept)
    assert table.shape[1] <= count, "a token needs more experts than there are"
    numbers = torch.full((num_experts,), -1, dtype=torch.int64, device=table.device)
    numbers[torch.tensor(kept, device=table.device)] = torch.arange(count, device=table.device)
    old = table.to(torch.int64)
    new = numbers[old]
    tokens = torch.arange(len(table), device=table.device)
    for slot in range(table.shape[1]):
        lost = new[:, slot] < 0
        candidate = (tokens + old[:, slot]) % count
        while bool((taken := lost & (new == candidate.unsqueeze(1)).any(1)).any()):
            candidate = torch.where(taken, (candidate + 1) % count, candidate)
        new[:, slot] = torch.where(lost, candidate, new[:, slot])
    return new.to(table.dtype)


# Attributes that hold the number of all classes of the router and are read in a forward pass.
CLASS_ATTRIBUTES = ("n_routed_experts", "total_experts", "num_router_classes", "n_total_experts")


class PrunedModel:
    """Slices of every tensor with an expert axis, made once; entering and leaving swaps pointers, any number of times.

    While it is open the model behaves exactly like the exported checkpoint: the router has rows for the kept experts
    only, so its softmax, groups and renormalisation run over those (the sliced semantics, not a mask).
    """

    def __init__(self, layers: Sequence[MoELayer], plan: PrunePlan) -> None:
        self._swaps = [swap for layer in layers for swap in _swaps(layer, plan.kept[layer.name])]
        self._swaps += _config_swaps(layers, plan)
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

    Raises InputError when the plan was made for another model, or keeps numbers of experts that it cannot have.
    """
    layers = find_moe_layers(model)
    plan.require_model(model_fingerprint(model, layers), "model")
    plan.require_layers([layer.info for layer in layers], "model")
    return PrunedModel(layers, plan)


def _swaps(layer: MoELayer, kept: Sequence[int]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """(store, name, value inside the context) for every tensor and count of one layer."""
    count, extra = layer.info.num_experts, layer.extra
    for module, size in _expert_modules(layer):
        cuts: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                small = None if tensor is None else _without(layer, name, tensor.detach(), kept, size)
                if small is not None:
                    is_parameter = store is module._parameters
                    yield store, name, nn.Parameter(small, requires_grad=False) if is_parameter else small
                    cuts[name] = partial(_cut, layer, name, kept=kept, size=size)
        waiting = waiting_weights(module)
        if waiting is not None and cuts:
            yield waiting[0], "weights_map", Changed(waiting[1], partial(_changed, cuts))
        for name, value in list(module.__dict__.items()):
            if name in COUNT_KEYS and value == count:
                yield module.__dict__, name, len(kept)
            elif name in CLASS_ATTRIBUTES and extra and value == count + extra:
                yield module.__dict__, name, len(kept) + extra


def _config_swaps(layers: Sequence[MoELayer], plan: PrunePlan) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """The count in configs that modules read in a forward pass. Raises InputError when layers need different ones."""
    readers = [layer for layer in layers if layer.family.reads_config]
    counts = {len(plan.kept[layer.name]) for layer in readers}
    if len(counts) > 1:
        raise InputError(
            f"{readers[0].family.model_type}: the model reads one number of experts for all layers, the plan keeps "
            f"{sorted(counts)}; use selection.budget.scope=layer"
        )
    stores = {id(layer.router.config): layer.router.config.__dict__ for layer in readers}
    for store in stores.values():
        for name in COUNT_KEYS:
            if store.get(name) == readers[0].info.num_experts:
                yield store, name, next(iter(counts))


def _expert_modules(layer: MoELayer) -> Iterator[tuple[nn.Module, int]]:
    """The block itself (not its shared experts), the router and the experts with their submodules; rows an expert."""
    if not layer.family.bare:
        yield layer.block, 1
    for module in layer.router.modules():
        yield module, 1
    for module in layer.experts.modules():
        rows = [p.shape[0] for p in module.parameters(recurse=False)] if layer.family.flat_rows else []
        yield module, rows[0] // layer.info.num_experts if rows else 1


def _without(layer: MoELayer, name: str, tensor: torch.Tensor, kept: Sequence[int], size: int) -> torch.Tensor | None:
    """The tensor with the kept experts alone, `size` rows each, and the rows after them; None when it has none."""
    count = layer.info.num_experts
    if name and name == layer.family.expert_table:
        return remapped(tensor, kept, count)
    axis, extra = 0, 0
    if tensor.ndim == 2 and tensor.shape[0] == 1 and tensor.shape[1] == count:
        axis = 1
    elif tensor.ndim and layer.extra and tensor.shape[0] == count + layer.extra:
        extra = layer.extra
    elif not tensor.ndim or tensor.shape[0] != count * size:
        return None
    rows = [expert * size + row for expert in kept for row in range(size)] + list(range(count, count + extra))
    return tensor.index_select(axis, torch.tensor(rows, device=tensor.device))


def _changed(
    cuts: Mapping[str, Callable[[torch.Tensor], torch.Tensor]], name: str, tensor: torch.Tensor
) -> torch.Tensor:
    return cuts[name](tensor) if name in cuts else tensor


def _cut(layer: MoELayer, name: str, tensor: torch.Tensor, *, kept: Sequence[int], size: int) -> torch.Tensor:
    small = _without(layer, name, tensor, kept, size)
    assert small is not None
    return small
