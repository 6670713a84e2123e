"""What happens to each tensor of a checkpoint, as plain data: drop, renumber, slice, replace. No entry: copied.

    edits = expert_edits(checkpoint, {"model.layers.3.mlp": [0, 2, 5, 7], ...})

Expert pruning and the dense methods both end here; the writer knows edits only.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from moeprune.artifacts.errors import InputError
from moeprune.checkpoint.headers import Entry
from moeprune.checkpoint.inventory import Inventory, Tensor
from moeprune.checkpoint.memory_names import EXPERT_NUMBER
from moeprune.checkpoint.tables import read_table, rewritten_table

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
