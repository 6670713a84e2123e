"""Where each compressed weight lies in the checkpoint, found by value rather than by family rules.

The model in memory still holds the source's numbers when this runs, so a tensor on disk IS some rows of a weight in
memory: all of them, the gate half, the up half, or every other one. Whatever is none of these is refused.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from safetensors import safe_open

from moeprune.artifacts.errors import InputError
from moeprune.checkpoint.edits import Inventory
from moeprune.dense.weights import Seen, Weight

ROWS = ("all", "first", "second", "even", "odd")  # first and second: halves


@dataclass(frozen=True)
class Place:
    """One tensor on disk as rows of weights in memory."""

    name: str  # on disk
    dtype: str  # safetensors' spelling
    shape: tuple[int, ...]
    weights: tuple[Weight, ...]  # one, or all experts of a tensor that holds them all
    rows: str  # one of ROWS
    flipped: bool  # stored (in, out)

    @property
    def fused(self) -> bool:
        return len(self.shape) == 3

    def arranged(self, values: Iterable[torch.Tensor]) -> torch.Tensor:
        """The tensor on disk from one (out, ...) value of each weight."""
        parts = [rows_of(value, self.rows) for value in values]
        parts = [part.T if self.flipped else part for part in parts]
        return torch.stack(parts) if self.fused else parts[0]


def rows_of(value: torch.Tensor, rows: str) -> torch.Tensor:
    """The rows of a value (out, ...) that a tensor on disk holds."""
    half = value.shape[0] // 2
    spans = {
        "all": slice(None),
        "first": slice(None, half),
        "second": slice(half, None),
        "even": slice(0, None, 2),
        "odd": slice(1, None, 2),
    }
    return value[spans[rows]]


def locate(checkpoint: Inventory, seen: Seen, names: Iterable[str]) -> dict[str, Place]:
    """Tensor on disk -> its place, for everything that feeds the named weights; run before the model is changed.

    Raises InputError for a weight whose numbers are not found where the loading rules say.
    """
    wanted = set(names)
    by_parameter: dict[str, list[Weight]] = {}
    for weight in seen.weights:
        by_parameter.setdefault(_parameter(weight), []).append(weight)
    by_parameter = {key: found for key, found in by_parameter.items() if any(w.name in wanted for w in found)}
    places: dict[str, Place] = {}
    for name, tensor in _tensors(checkpoint, by_parameter):
        source = checkpoint.by_name[name]
        assert source.target is not None
        weights = by_parameter[source.target]
        if source.expert is not None:
            weights = [weight for weight in weights if weight.expert == source.expert and weight.name in wanted]
        if weights:
            places[name] = _place(name, source.entry.dtype, tensor, weights)
    _require_complete(wanted, places)
    return places


def _parameter(weight: Weight) -> str:
    """The parameter's name in the model."""
    if weight.expert is None:
        return f"{weight.name}.{weight.part}"
    return f"{weight.name.removesuffix(f'.{weight.expert}.{weight.part}')}.{weight.part}"


def _tensors(checkpoint: Inventory, wanted: Mapping[str, object]) -> Iterator[tuple[str, torch.Tensor]]:
    """The source's tensors that feed the wanted parameters, one in memory at a time."""
    for shard in checkpoint.shards:
        names = [t.name for t in checkpoint.tensors if t.shard == shard and t.target in wanted]
        if names:
            with safe_open(checkpoint.directory / shard, framework="pt") as file:
                for name in names:
                    yield name, file.get_tensor(name)


def _place(name: str, dtype: str, tensor: torch.Tensor, weights: Sequence[Weight]) -> Place:
    if dtype not in ("F32", "BF16", "F16"):
        raise InputError(f"{name}: stored as {dtype}, quantised already; compress the unquantised checkpoint")
    shape = tuple(tensor.shape)
    stacked = tensor if tensor.ndim == 3 else tensor[None]
    if len(stacked) == len(weights):
        stored = stacked.to(weights[0].dtype)
        for flipped in (False, True):
            for rows in ROWS:
                if all(_is_at(part, weight, rows, flipped) for part, weight in zip(stored, weights, strict=True)):
                    return Place(name, dtype, shape, tuple(weights), rows, flipped)
    raise InputError(
        f"{name}: its numbers are not rows of {weights[0].name} in memory; how this family stores the weight is not "
        "understood. Leave it out of targets"
    )


def _is_at(part: torch.Tensor, weight: Weight, rows: str, flipped: bool) -> bool:
    there = rows_of(weight.read().to(weight.dtype), rows).cpu()
    part = part.T if flipped else part
    return there.shape == part.shape and torch.equal(there, part)


def _require_complete(wanted: Iterable[str], places: Mapping[str, Place]) -> None:
    """Every row of every weight is written by exactly one tensor."""
    found: dict[str, list[str]] = {}
    for place in places.values():
        for weight in place.weights:
            found.setdefault(weight.name, []).append(place.rows)
    whole = (["all"], ["first", "second"], ["even", "odd"])
    for name in wanted:
        rows = sorted(found.get(name, []))
        if rows not in whole:
            raise InputError(
                f"{name}: found {', '.join(rows) or 'none'} of its rows in the checkpoint; leave it out of targets"
            )
