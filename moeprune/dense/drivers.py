"""The walk over a checkpoint's weights, in memory or one block at a time, and the way to compare what is written."""

import math
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import existing_parent
from moeprune.checkpoint.inventory import Inventory
from moeprune.checkpoint.options import Layout
from moeprune.data.trajectories import TokenSet
from moeprune.dense.export import Export
from moeprune.dense.method import DenseMethod
from moeprune.dense.order import chains
from moeprune.dense.reload import Reloaded, require_reloads
from moeprune.dense.reload_streamed import require_reloads_streamed
from moeprune.dense.report import DenseReport
from moeprune.dense.streamed import compress_streamed, foreseen_export
from moeprune.dense.walk import Compressed, compress_model
from moeprune.dense.weights import look
from moeprune.experiment.console import progress, say
from moeprune.models.layers import moe_layers_if_any
from moeprune.models.loading import Dtype, ModelOptions, align, device_of, number_bytes, pretrained, without_bars
from moeprune.models.memory import free_bytes, loading_bytes
from moeprune.models.streaming import affordable_tokens, affordable_tokens_in_memory, open_streamed

Streaming = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class Walk:
    """What is to be done, and where."""

    checkpoint: Inventory
    methods: Sequence[DenseMethod]
    tokens: TokenSet | None
    state: Path  # where finished blocks lie until the caller removes it; without enough room there nothing is begun
    dtype: Dtype
    device: str
    batch_tokens: int
    layout: Layout


@dataclass(frozen=True)
class Walked:
    """What a walk made, before it is written."""

    export: Export
    compressed: Compressed
    reload: Callable[
        [Path, Collection[str]], Reloaded
    ]  # compares a written directory; names transformers does not load

    @property
    def report(self) -> DenseReport:
        return self.compressed.report


def walked(walk: Walk, *, streaming: Streaming) -> Walked:
    """The checkpoint's weights after all methods. On a CPU the bits do not depend on `streaming`."""
    walk = replace(walk, device=device_of(walk.device))
    if streams(walk.checkpoint, walk.dtype, walk.device, streaming):
        size = sum(tensor.entry.size for tensor in walk.checkpoint.tensors)
        say(f"dense: {size / 1e9:,.1f} GB of weights are read block by block")
        return _streamed(walk)
    return _in_memory(walk)


def streams(checkpoint: Inventory, dtype: Dtype, device: str, streaming: Streaming) -> bool:
    """Whether blocks are read one by one: when told to, or when model and result, or what loading takes, do not fit."""
    if streaming != "auto":
        return streaming == "on"
    weights = number_bytes(dtype, device) * checkpoint.memory.elements
    return max(2 * weights, loading_bytes(weights, device)) > free_bytes(device)


def _in_memory(walk: Walk) -> Walked:
    with without_bars():
        model = pretrained(walk.checkpoint.directory, walk.dtype, device=walk.device).to(walk.device)
    align(model)
    export = Export(walk.checkpoint, model, walk.methods, layout=walk.layout)
    require_room(export, model, walk.methods, walk.state)
    batch_tokens = walk.batch_tokens
    if walk.device == "cpu":  # no slower there, and what a streamed walk takes
        batch_tokens = min(batch_tokens, affordable_tokens_in_memory(model, moe_layers_if_any(model)))
    with progress("compressing", unit="blocks") as advance:
        done = compress_model(
            model,
            walk.methods,
            walk.tokens,
            batch_tokens=batch_tokens,
            dtype=export.dtype,
            state=walk.state,
            on_progress=advance,
        )

    def reload(directory: Path, unused: Collection[str]) -> Reloaded:
        return require_reloads(directory, model, done.report, unused=unused)

    return Walked(export, done, reload)


def _streamed(walk: Walk) -> Walked:
    source = walk.checkpoint.directory
    streamed = open_streamed(ModelOptions(path=str(source), dtype=walk.dtype), device=walk.device)
    export = foreseen_export(streamed, walk.checkpoint, walk.methods, layout=walk.layout)
    require_room(export, streamed.model, walk.methods, walk.state)
    batch_tokens = min(walk.batch_tokens, affordable_tokens(streamed, moe_layers_if_any(streamed.model)))
    with progress("compressing", unit="blocks") as advance:
        done = compress_streamed(
            streamed,
            export,
            walk.methods,
            walk.tokens,
            state=walk.state,
            batch_tokens=batch_tokens,
            on_progress=advance,
        )

    def reload(directory: Path, unused: Collection[str]) -> Reloaded:
        scratch = walk.state / "waiting"
        return require_reloads_streamed(directory, source, done, dtype=export.dtype, scratch=scratch, unused=unused)

    return Walked(export, done, reload)


def require_room(export: Export, model: Any, methods: Sequence[DenseMethod], state: Path) -> None:
    """Raises InputError when the disk of `state` has no room for the walk's results and, beside them, the checkpoint.

    Results wait there as plain numbers in the checkpoint's dtype.
    """
    seen = look(model)
    found = chains(seen, methods)
    waiting = export.dtype.itemsize * sum(math.prod(weight.shape) for weight in seen.weights if weight.name in found)
    there = sum(path.stat().st_size for path in state.rglob("*.safetensors")) if state.is_dir() else 0
    before, after = export.replaced_bytes
    written = sum(tensor.entry.size for tensor in export.checkpoint.tensors) - before + after
    needed, free = max(0, waiting - there) + written, shutil.disk_usage(existing_parent(state)).free
    if needed > free:
        raise InputError(
            f"{state.parent}: {needed / 2**30:.2f} GiB are needed there ({waiting / 2**30:.2f} of them until all "
            f"blocks are done) and {free / 2**30:.2f} GiB are free; make room or give a directory on another disk"
        )
