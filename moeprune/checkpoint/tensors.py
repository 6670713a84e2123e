"""What a tensor on disk is: one expert's, all experts', a router's, or something that pruning leaves alone.

Tensors that are not understood are refused, because cutting them might be wrong.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.safetensors_files import Entry
from moeprune.checkpoint.names import MemoryModel
from moeprune.models.disk_names import expert_number

# expert: one expert's own tensor; fused: all experts of a layer in one; router: anything that scores experts;
# table: expert ids by token; mtp: a multi-token-prediction layer; other: everything else, copied as it is
Role = Literal["expert", "fused", "router", "table", "mtp", "other"]

_MTP_NAME = re.compile(r"(?:^|\.)(?:mtp|nextn|mtp_\w+)(?:\.|$)")


@dataclass(frozen=True)
class Tensor:
    """One tensor of the checkpoint and what it is."""

    entry: Entry
    shard: str  # file name
    target: str | None  # parameter or buffer in memory that it feeds; None when transformers does not load it
    role: Role = "other"
    layer: str | None = None  # module path of the MoE block
    expert: int | None = None  # only of role expert; numbers after the experts' are of classes that are none
    axis: int | None = None  # on disk, runs over experts; only of roles fused and router
    size: int = 1  # rows an expert has on that axis
    extra: int = 0  # rows after the experts' that belong to none

    @property
    def name(self) -> str:
        return self.entry.name


def classified(memory: MemoryModel, file: str, entry: Entry) -> Tensor:
    target = memory.target_of(entry.name)
    if target in memory.tables:
        return Tensor(entry, file, target, "table", memory.tables[target])
    expert_axis = memory.expert_axes.get(target) if target is not None else None
    if expert_axis is None:
        return Tensor(entry, file, target, "mtp" if target is None and _is_mtp(memory, entry.name) else "other")
    number = expert_number(entry.name)
    if number is not None:
        if number >= memory.num_experts + expert_axis.extra:
            raise InputError(
                f"{entry.name}: expert {number} of {memory.num_experts}; the config and the weights disagree"
            )
        return Tensor(entry, file, target, "expert", expert_axis.layer, number)
    assert target is not None
    role: Role = "router" if memory.is_router(target) else "fused"
    rows = memory.num_experts * expert_axis.size + expert_axis.extra
    axis = _axis_on_disk(entry, rows, expert_axis.axis)
    if axis is None and entry.elements == 1:  # one scale for all experts of a fused tensor
        return Tensor(entry, file, target)
    if axis is None:
        raise InputError(
            f"{entry.name}: has shape {list(entry.shape)} and belongs to {memory.num_experts} experts, but no axis "
            "of it runs over them; this layout is not understood"
        )
    return Tensor(
        entry, file, target, role, expert_axis.layer, axis=axis, size=expert_axis.size, extra=expert_axis.extra
    )


def _axis_on_disk(entry: Entry, rows: int, axis: int) -> int | None:
    """The axis of experts on disk: where it is in memory, else the only one of that size beside axes of size 1."""
    if axis < len(entry.shape) and entry.shape[axis] == rows:
        return axis
    if sorted(entry.shape)[:-1] == [1] * (len(entry.shape) - 1) and rows in entry.shape:
        return entry.shape.index(rows)
    return None


def _is_mtp(memory: MemoryModel, name: str) -> bool:
    """Whether a tensor that transformers does not load is one of a multi-token-prediction layer."""
    layers = getattr(memory.config.get_text_config(), "num_hidden_layers", None)
    beyond = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    is_beyond = beyond is not None and layers is not None and int(beyond.group(1)) >= layers
    return is_beyond or _MTP_NAME.search(name) is not None


PLAIN = ("BF16", "F16", "F32", "F64")


def require_understood(directory: Path, memory: MemoryModel, tensors: tuple[Tensor, ...]) -> None:
    """Raises InputError, with a tensor's name, for incomplete experts and for what may depend on their number."""
    _require_complete(directory, memory, tensors)
    _require_known_blocks(memory, tensors)
    _require_no_tables_of_experts(memory, tensors)


def require_plain_experts(tensors: tuple[Tensor, ...]) -> None:
    """Raises InputError for experts that are not plain numbers although nothing says that they are quantised."""
    for tensor in tensors:
        if tensor.layer is not None and tensor.role != "table" and tensor.entry.dtype not in PLAIN:
            raise InputError(
                f"{tensor.name}: stored as {tensor.entry.dtype}, but config.json has no quantization_config that says "
                "how; add it, or prune the unquantised checkpoint"
            )


def _require_complete(directory: Path, memory: MemoryModel, tensors: tuple[Tensor, ...]) -> None:
    """Every expert has the same tensors, and every parameter with an expert axis is on disk."""
    experts: dict[tuple[str, str], set[int]] = {}
    extra: dict[tuple[str, str], int] = {}  # classes that are no experts and have weights all the same
    for tensor in tensors:
        if tensor.role == "expert":
            assert tensor.expert is not None
            before, _, after = tensor.name.rpartition(f"experts.{tensor.expert}.")
            experts.setdefault((before, after), set()).add(tensor.expert)
            extra[before, after] = memory.expert_axes[tensor.target].extra if tensor.target else 0
    for (before, after), ids in experts.items():
        missing = sorted(set(range(memory.num_experts + extra[before, after])) - ids)
        if missing:
            name = f"{before}experts.{missing[0]}.{after}"
            raise InputError(
                f"{directory}: {name} is missing, other experts of the layer have it; download the checkpoint again"
            )
    fed = {tensor.target for tensor in tensors}
    for parameter in (*memory.expert_axes, *memory.tables):
        if parameter not in fed:
            raise InputError(
                f"{directory}: no tensor for {parameter}; the checkpoint is incomplete or of another architecture"
            )


def _require_known_blocks(memory: MemoryModel, tensors: tuple[Tensor, ...]) -> None:
    """A tensor that transformers does not load, in a MoE block and with an axis as long as the experts, is refused."""
    prefixes = tuple(_block_prefixes(tensors))
    for tensor in tensors:
        if tensor.target is not None or tensor.role != "other" or not tensor.name.startswith(prefixes):
            continue
        if memory.num_experts in tensor.entry.shape or expert_number(tensor.name) is not None:
            raise InputError(
                f"{tensor.name}: an unknown tensor of shape {list(tensor.entry.shape)} in a MoE block of "
                f"{memory.num_experts} experts; whether it has to be cut is not known, so nothing is written"
            )


def _require_no_tables_of_experts(memory: MemoryModel, tensors: tuple[Tensor, ...]) -> None:
    """Whole numbers in a router that are not known to be expert ids may be some, and would need renumbering."""
    routers = tuple(name.rpartition(".")[0] + "." for name in memory.router_weights.values())
    integers = {n for n, t in memory.model.state_dict().items() if not t.is_floating_point() and t.numel() > 1}
    for tensor in tensors:
        target = tensor.target if tensor.role != "table" else None
        if target is not None and target in integers and target.startswith(routers):
            raise InputError(
                f"{tensor.name}: whole numbers in a router, perhaps expert ids; how to renumber them is not known"
            )


def _block_prefixes(tensors: tuple[Tensor, ...]) -> Iterator[str]:
    """What the names of a MoE block's tensors begin with on disk, e.g. `model.layers.3.block_sparse_moe.`."""
    prefixes: dict[str, str] = {}
    for tensor in tensors:
        if tensor.layer is not None:
            known = prefixes.get(tensor.layer)
            prefixes[tensor.layer] = tensor.name if known is None else _common_modules(known, tensor.name)
    yield from prefixes.values()


def _common_modules(a: str, b: str) -> str:
    """The longest common prefix that ends after a whole module name."""
    length = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    return a[:length].rpartition(".")[0] + "." if "." in a[:length] else ""
