"""What a tensor on disk is: one expert's, all experts', a router's, or something that pruning leaves alone."""

import re
from dataclasses import dataclass
from typing import Literal

from moeprune.artifacts.errors import InputError
from moeprune.checkpoint.headers import Entry
from moeprune.checkpoint.memory_names import MemoryModel, expert_number

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
