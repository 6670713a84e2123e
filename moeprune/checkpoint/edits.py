"""What happens to each tensor of a checkpoint, as plain data: drop, renumber, slice, replace. No entry: copied.

    edits = expert_edits(checkpoint, {"model.layers.3.mlp": [0, 2, 5, 7], ...})

Expert pruning and the dense methods both end here; the writer knows edits only. What names experts by number follows
them: module names in quantisation settings, and tables on disk that list the experts of every token id.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.safetensors_files import Entry
from moeprune.checkpoint.inventory import Inventory, Tensor
from moeprune.models.disk_names import EXPERT_NUMBER

_TYPES = {"I64": "<i8", "I32": "<i4"}


def read_table(file: Path, entry: Entry) -> np.ndarray:
    """Expert ids (tokens, k), as they are stored. Raises InputError for another type or a number of axes."""
    if entry.dtype not in _TYPES or len(entry.shape) != 2:
        raise InputError(
            f"{entry.name}: expert ids by token, stored as {entry.dtype} {list(entry.shape)}; known: (tokens, k) of "
            f"{' or '.join(_TYPES)}"
        )
    with file.open("rb") as source:
        source.seek(entry.start)
        return np.frombuffer(source.read(entry.size), dtype=_TYPES[entry.dtype]).reshape(entry.shape)


def rewritten_table(file: Path, entry: Entry, order: Sequence[int], num_experts: int) -> bytes:
    """The table's bytes when expert j is what expert `order[j]` was; see models.expert_table for removed ones."""
    import torch

    from moeprune.models.pruned import remapped

    table = torch.from_numpy(read_table(file, entry).copy())
    return remapped(table, order, num_experts).numpy().tobytes()


def replaced_share(file: Path, entry: Entry, kept: Sequence[int]) -> float:
    """The share of entries that name an expert which is not kept."""
    return float(np.isin(read_table(file, entry), kept, invert=True).mean())


_NUMBER = re.compile(r"(?<=\bexperts\.)\d+(?=\.|$)")
_NUMBER_IN_PATTERN = re.compile(r"\bexperts\\?\.\d+")


def module_renamer(checkpoint: Inventory, orders: Mapping[str, Sequence[int]]) -> Callable[[str], str | None]:
    """A function from a module's name or pattern to the one that means the same modules after the edit, None for none.

    It raises InputError for an expert's number in a regular expression, and for one in a block that is not known.
    """
    layers = _layers_by_prefix(checkpoint)
    numbers = {
        layer: {str(old): str(new) for new, old in enumerate([*order, *checkpoint.memory.extra_ids(layer)])}
        for layer, order in orders.items()
    }
    mtp = [tensor.name for tensor in checkpoint.mtp]

    def renamed(name: str) -> str | None:
        match = _NUMBER.search(name)
        if match is None and _NUMBER_IN_PATTERN.search(name) is None:
            return name
        layer = layers.get(name[: match.start()]) if match is not None else None
        if match is not None and layer is not None:
            number = numbers[layer].get(match.group())
            return None if number is None else name[: match.start()] + number + name[match.end() :]
        if match is not None and any(tensor.startswith(name[: match.start()]) for tensor in mtp):
            return None
        raise InputError(
            f"quantization_config names {name!r}, an expert by its number, and whose is not clear; it cannot be "
            "renumbered. Spell out the module names"
        )

    return renamed


def _layers_by_prefix(checkpoint: Inventory) -> dict[str, str]:
    """What the names of a layer's experts begin with, on disk and in memory -> the layer."""
    prefixes = {f"{layer.name}.experts.": layer.name for layer in checkpoint.layers}
    for tensor in checkpoint.tensors:
        if tensor.role == "expert":
            match = EXPERT_NUMBER.search(tensor.name)
            assert match is not None
            assert tensor.layer is not None
            prefixes[tensor.name[: match.start()]] = tensor.layer
    return prefixes


Span = tuple[int, int]  # start and stop, counted from the beginning of the source file


@dataclass(frozen=True)
class Drop:
    """The tensor is left out."""


@dataclass(frozen=True)
class Renumber:
    """The same bytes under another name."""

    name: str


@dataclass(frozen=True)
class Slice:
    """The rows at `rows` of one axis, in that order, byte for byte."""

    rows: tuple[int, ...]
    axis: int = 0


@dataclass(frozen=True)
class NewTensor:
    """A tensor made elsewhere. `data` is called when the writer gets there, so one of them is in memory at a time."""

    name: str
    dtype: str  # in safetensors' spelling: "BF16", "F8_E4M3", "I32", ...
    shape: tuple[int, ...]
    size: int  # bytes
    data: Callable[[], bytes | bytearray | memoryview]
    key: str | None = None  # equal for equal bytes, so that a killed call can be resumed; None: not known


@dataclass(frozen=True)
class Replace:
    """The tensor gives way to others, for example a weight to its quantised values and their scales."""

    tensors: tuple[NewTensor, ...]


Edit = Drop | Renumber | Slice | Replace
Edits = Mapping[str, Edit]  # name in the source -> what happens to it


@dataclass(frozen=True)
class Output:
    """One tensor of the result: bytes of the source file at `spans`, or whatever `data` returns."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int  # bytes
    spans: tuple[Span, ...] = ()
    data: Callable[[], bytes | bytearray | memoryview] | None = None
    key: str | None = None


def expert_edits(checkpoint: Inventory, orders: Mapping[str, Sequence[int]]) -> dict[str, Edit]:
    """Edits after which expert j of a layer is what expert `orders[layer][j]` was; the others are gone.

    Ascending orders prune; a full permutation only renames experts. A layer that is not named stays.
    """
    numbers = {
        layer: {old: new for new, old in enumerate([*order, *checkpoint.memory.extra_ids(layer)])}
        for layer, order in orders.items()
    }
    edits: dict[str, Edit] = {}
    for tensor in checkpoint.tensors:
        if tensor.layer is None or tensor.layer not in orders:
            continue
        if tensor.role == "expert":
            assert tensor.expert is not None
            edits[tensor.name] = _renumbered(tensor.name, numbers[tensor.layer].get(tensor.expert))
        elif tensor.role == "table":
            edits[tensor.name] = _table_edit(checkpoint, tensor, orders[tensor.layer])
        else:
            edits[tensor.name] = _kept_rows(tensor, orders[tensor.layer], checkpoint.memory.num_experts)
    return edits


def _kept_rows(tensor: Tensor, order: Sequence[int], count: int) -> Slice:
    assert tensor.axis is not None
    rows = [expert * tensor.size + row for expert in order for row in range(tensor.size)]
    return Slice((*rows, *range(count * tensor.size, count * tensor.size + tensor.extra)), tensor.axis)


def _table_edit(checkpoint: Inventory, tensor: Tensor, order: Sequence[int]) -> Replace:
    entry, order = tensor.entry, tuple(order)
    read_table(checkpoint.directory / tensor.shard, entry)  # refuses what is not understood, before anything is written

    def data() -> bytes:
        return rewritten_table(checkpoint.directory / tensor.shard, entry, order, checkpoint.memory.num_experts)

    return Replace((NewTensor(entry.name, entry.dtype, entry.shape, entry.size, data, key=f"table {order}"),))


def mtp_edits(checkpoint: Inventory) -> dict[str, Edit]:
    """Edits that leave multi-token-prediction layers out."""
    return {tensor.name: Drop() for tensor in checkpoint.mtp}


def _renumbered(name: str, number: int | None) -> Edit:
    return Drop() if number is None else Renumber(EXPERT_NUMBER.sub(str(number), name, count=1))


def outputs(tensor: Tensor, edit: Edit | None) -> Iterator[Output]:
    """The tensors of the result that one tensor of the source becomes."""
    entry = tensor.entry
    if edit is None or isinstance(edit, Renumber):
        name = entry.name if edit is None else edit.name
        yield Output(name, entry.dtype, entry.shape, entry.size, ((entry.start, entry.stop),) if entry.size else ())
    elif isinstance(edit, Slice):
        yield _sliced(entry, edit)
    elif isinstance(edit, Replace):
        yield from (Output(new.name, new.dtype, new.shape, new.size, (), new.data, new.key) for new in edit.tensors)


def _sliced(entry: Entry, edit: Slice) -> Output:
    length = entry.shape[edit.axis]
    assert all(0 <= row < length for row in edit.rows), f"{entry.name}: rows {edit.rows} of an axis of {length}"
    outer = math.prod(entry.shape[: edit.axis])
    row, rest = divmod(entry.size, outer * length)
    if rest:
        raise InputError(
            f"{entry.name}: {entry.dtype} {list(entry.shape)} packs several rows into one byte; it cannot be cut"
        )
    starts = (entry.start + (block * length + index) * row for block in range(outer) for index in edit.rows)
    shape = (*entry.shape[: edit.axis], len(edit.rows), *entry.shape[edit.axis + 1 :])
    return Output(entry.name, entry.dtype, shape, outer * len(edit.rows) * row, joined((s, s + row) for s in starts))


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same bytes in fewer spans: neighbours that touch become one."""
    result: list[Span] = []
    for start, stop in spans:
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        elif stop > start:
            result.append((start, stop))
    return tuple(result)
