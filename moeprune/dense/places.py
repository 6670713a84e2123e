"""Where each compressed weight lies in the checkpoint, found by value rather than by family rules.

The model in memory still holds the source's numbers when this runs, so a tensor on disk IS some rows of a weight in
memory: all of them, the gate half, the up half, or every other one. Whatever is none of these is refused.

A model that is not in memory as a whole: blocks that are alike are stored alike, so a few blocks tell where all weights
lie (`locate` those, `foresee` the rest), and every block is compared when it is there (`require_places`).
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from safetensors import safe_open

from moeprune.artifacts.errors import InputError
from moeprune.checkpoint.edits import Entry, Inventory
from moeprune.dense.weights import Seen, Weight

ROWS = ("all", "first", "second", "even", "odd")  # first and second: halves


@dataclass(frozen=True)
class StoredAs:
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

    def part(self, value: torch.Tensor) -> torch.Tensor:
        """What the tensor on disk holds of the value (out, ...) of one weight."""
        rows = rows_of(value, self.rows)
        return rows.T if self.flipped else rows

    def stacked(self, parts: Iterable[torch.Tensor]) -> torch.Tensor:
        """The tensor on disk from its parts, one of each weight."""
        if not self.fused:
            (part,) = parts
            return part
        whole: torch.Tensor | None = None
        for number, part in enumerate(parts):  # filled as they come: one of them is in memory beside it
            if whole is None:
                whole = torch.empty(self.shape, dtype=part.dtype)
            whole[number] = part
        assert whole is not None
        return whole


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


def locate(checkpoint: Inventory, seen: Seen, names: Iterable[str]) -> dict[str, StoredAs]:
    """Tensor on disk -> how it holds weights, for all that feed the named ones; run before the model is changed.

    Raises InputError for a weight whose numbers are not found where the loading rules say.
    """
    wanted = set(names)
    fed = _fed(checkpoint, seen, wanted)
    places = {}
    for name, parts in _tensors(checkpoint, fed):
        places[name] = _stored_as(checkpoint.by_name[name].entry, parts, fed[name])
    _require_complete(wanted, places)
    return places


def foresee(
    checkpoint: Inventory, seen: Seen, names: Iterable[str], examples: Iterable[StoredAs]
) -> dict[str, StoredAs]:
    """What `locate` gives, from headers alone, for weights stored as the examples are.

    Raises InputError for a tensor that has no example, and for one that is quantised already.
    """
    wanted = set(names)
    known = {_template(stored.name): stored for stored in examples}
    places = {}
    for name, weights in _fed(checkpoint, seen, wanted).items():
        entry, like = checkpoint.by_name[name].entry, known.get(_template(name))
        _require_plain(name, entry.dtype)
        if like is None:
            raise InputError(f"{name}: stored unlike other layers; how is not understood. Leave it out of targets")
        places[name] = StoredAs(name, entry.dtype, entry.shape, tuple(weights), like.rows, like.flipped)
    _require_complete(wanted, places)
    return places


def require_places(checkpoint: Inventory, places: Iterable[StoredAs]) -> None:
    """Raises InputError unless the weights of these places, which are in memory, lie there on disk."""
    by_name = {stored.name: stored for stored in places}
    for name, parts in _tensors(checkpoint, by_name):
        stored = by_name[name]
        for part, weight in zip(parts, stored.weights, strict=True):
            if not _is_at(part(), weight, stored.rows, stored.flipped):
                raise InputError(
                    f"{name}: its numbers are not those of {weight.name} in memory, though other layers are stored "
                    "this way; leave it out of targets"
                )


def block_kinds(seen: Seen, names: Iterable[str]) -> list[int]:
    """The first block of each kind: blocks are alike when the named weights in them are called alike."""
    wanted = set(names)
    kinds: dict[int, set[str]] = {}
    for weight in seen.weights:
        if weight.name in wanted:
            kinds.setdefault(weight.block, set()).add(_template(weight.name))
    first: dict[frozenset[str], int] = {}
    for block, kind in sorted(kinds.items()):
        first.setdefault(frozenset(kind), block)
    return sorted(first.values())


def _template(name: str) -> str:
    """A name without the numbers of layers and experts."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "#", name)


def parameter_of(weight: Weight) -> str:
    """The parameter's name in the model."""
    if weight.expert is None:
        return f"{weight.name}.{weight.part}"
    return f"{weight.name.removesuffix(f'.{weight.expert}.{weight.part}')}.{weight.part}"


def _fed(checkpoint: Inventory, seen: Seen, wanted: set[str]) -> dict[str, list[Weight]]:
    """Tensor on disk -> the weights it feeds, of those that feed a wanted one."""
    by_parameter: dict[str, list[Weight]] = {}
    for weight in seen.weights:
        by_parameter.setdefault(parameter_of(weight), []).append(weight)
    by_parameter = {key: fed for key, fed in by_parameter.items() if any(w.name in wanted for w in fed)}
    fed = {}
    for tensor in checkpoint.tensors:
        weights = by_parameter.get(tensor.target or "", [])
        if tensor.expert is not None:
            weights = [weight for weight in weights if weight.expert == tensor.expert and weight.name in wanted]
        if weights:
            fed[tensor.name] = weights
    return fed


Parts = Sequence[Callable[[], torch.Tensor]]  # of a tensor of three axes its slices, of any other the tensor itself


def source_part(checkpoint: Inventory, name: str, number: int) -> torch.Tensor:
    """What a tensor on disk holds of one of its weights."""
    tensor = checkpoint.by_name[name]
    with safe_open(checkpoint.directory / tensor.shard, framework="pt") as file:
        return _parts(file, name, tensor.entry.shape)[number]()


def _tensors(checkpoint: Inventory, names: Iterable[str]) -> Iterator[tuple[str, Parts]]:
    """(name, parts) of tensors on disk; one part is in memory at a time."""
    wanted = set(names)
    for shard in checkpoint.shards:
        tensors = [tensor for tensor in checkpoint.tensors if tensor.shard == shard and tensor.name in wanted]
        if tensors:
            with safe_open(checkpoint.directory / shard, framework="pt") as file:
                for tensor in tensors:
                    yield tensor.name, _parts(file, tensor.name, tensor.entry.shape)


def _parts(file: Any, name: str, shape: tuple[int, ...]) -> Parts:
    if len(shape) != 3:
        return [partial(file.get_tensor, name)]
    stored = file.get_slice(name)
    return [partial(stored.__getitem__, number) for number in range(shape[0])]


def _require_plain(name: str, dtype: str) -> None:
    if dtype not in ("F32", "BF16", "F16"):
        raise InputError(f"{name}: stored as {dtype}, quantised already; compress the unquantised checkpoint")


def _stored_as(entry: Entry, parts: Parts, weights: Sequence[Weight]) -> StoredAs:
    _require_plain(entry.name, entry.dtype)
    if len(parts) == len(weights):
        for flipped in (False, True):
            for rows in ROWS:
                if all(_is_at(part(), weight, rows, flipped) for part, weight in zip(parts, weights, strict=True)):
                    return StoredAs(entry.name, entry.dtype, entry.shape, tuple(weights), rows, flipped)
    raise InputError(
        f"{entry.name}: its numbers are not rows of {weights[0].name} in memory; how this family stores the weight is "
        "not understood. Leave it out of targets"
    )


def _is_at(part: torch.Tensor, weight: Weight, rows: str, flipped: bool) -> bool:
    expected = rows_of(weight.read().to(weight.dtype), rows).cpu()
    part = part.to(weight.dtype)
    part = part.T if flipped else part
    return expected.shape == part.shape and torch.equal(expected, part)


def _require_complete(wanted: Iterable[str], places: Mapping[str, StoredAs]) -> None:
    """Every row of every weight is written by exactly one tensor."""
    written: dict[str, list[str]] = {}
    for stored in places.values():
        for weight in stored.weights:
            written.setdefault(weight.name, []).append(stored.rows)
    whole = (["all"], ["first", "second"], ["even", "odd"])
    for name in wanted:
        rows = sorted(written.get(name, []))
        if rows not in whole:
            raise InputError(
                f"{name}: found {', '.join(rows) or 'none'} of its rows in the checkpoint; leave it out of targets"
            )
