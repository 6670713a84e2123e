"""The walk over a checkpoint's weights, in memory or one block at a time, and the way to compare what is written.

The walk over a checkpoint that is larger than memory: one decoder block's weights and statistics at a time.

export = foreseen_export(streamed, inventory(source), methods)      # refuses what `Export` refuses
result = compress_streamed(streamed, export, methods, tokens, state=folder)
export.edits(result)                                                # for the checkpoint writer

Every finished block is written to `state` at once; activations that wait do so there, too.
"""

import math
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import existing_parent
from moeprune.checkpoint.inventory import Inventory
from moeprune.checkpoint.options import Layout
from moeprune.console import progress, say
from moeprune.data.trajectories import Sequence as TokenSequence
from moeprune.data.trajectories import TokenSet, collate
from moeprune.dense.chain import chains
from moeprune.dense.export import Export
from moeprune.dense.finished import Finished, Lazily, files_told
from moeprune.dense.methods.method import DenseMethod
from moeprune.dense.places import Place, block_kinds, foresee, locate, parameter_of, require_places
from moeprune.dense.reload import Reloaded, require_reloads, require_reloads_streamed
from moeprune.dense.report import DenseReport
from moeprune.dense.walk import STATISTICS_BYTES, Compressed, Progress, Walk, compress_model
from moeprune.dense.weights import Weight, look
from moeprune.models.layers import moe_layers_if_any
from moeprune.models.loading import (
    align,
    device_of,
    number_bytes,
    pretrained,
    without_bars,
)
from moeprune.models.memory import free_bytes, give_back_freed_memory, loading_bytes
from moeprune.models.options import Dtype, ModelOptions
from moeprune.models.streaming.model import StreamedModel, affordable_tokens, affordable_tokens_in_memory, open_streamed
from moeprune.models.streaming.passes import LayerMajor

LEAST_STATISTICS = 2**28  # bytes that are always affordable


def foreseen_export(
    streamed: StreamedModel, checkpoint: Inventory, methods: Sequence[DenseMethod], *, layout: Layout = "auto"
) -> Export:
    """`Export` of a model that is not in memory: one block of each kind is read to see where its weights lie."""
    seen = look(streamed.model)
    found = chains(seen, methods)
    examples: list[Place] = []
    for block in block_kinds(seen, found):
        weights = [weight for weight in seen.weights if weight.block == block and weight.name in found]
        with _in_memory(streamed, weights):
            examples += locate(checkpoint, seen, [weight.name for weight in weights]).values()
    return Export(checkpoint, streamed.model, methods, layout=layout, places=foresee(checkpoint, seen, found, examples))


def compress_streamed(
    streamed: StreamedModel,
    export: Export,
    methods: Sequence[DenseMethod],
    tokens: TokenSet | None = None,
    *,
    state: Path,
    batch_tokens: int = 8192,
    on_progress: Progress | None = None,
) -> Compressed:
    """What `compress_model` gives, bit for bit on a CPU for the same `batch_tokens`, with one block in memory.

    state: where finished blocks and waiting activations lie; the same call resumes there. Results are read from it.
    A block's statistics take as much as its weights at most (or LEAST_STATISTICS); beyond that it is watched in rounds.
    Without a method that looks at data there is no forward pass, and only the weights that change are read.
    Raises what `compress_model` raises; InputError for a block that is not stored like others of its kind; and
    StreamingError when the model does not call its layers once each, in order.
    """
    limit = min(STATISTICS_BYTES, max(LEAST_STATISTICS, streamed.layer_bytes))
    walk = Walk(look(streamed.model), methods, tokens, batch_tokens=batch_tokens, dtype=export.dtype, limit=limit)
    source = export.checkpoint
    identity = walk.identity(files_told(source.directory / name for name in source.shards))
    finished = Finished(state, identity, file_bytes=max(2**24, streamed.layer_bytes // 16))
    walk.open(finished)
    _Streamed(streamed, export, walk, finished, on_progress).run(state / "waiting")
    names = [weight.name for block in range(walk.last + 1) for weight in walk.of(block)]
    quantised = [name for name in names if finished.grid(name) is not None]
    return Compressed(walk.report(), Lazily(quantised, finished.grid), Lazily(names, finished.weight))


class _Streamed:
    """Brings the blocks of a walk into memory, one after the other."""

    def __init__(
        self, streamed: StreamedModel, export: Export, walk: Walk, finished: Finished, on_progress: Progress | None
    ) -> None:
        self._streamed, self._export, self._walk, self._finished = streamed, export, walk, finished
        self._on_progress = on_progress
        self._places: dict[int, list[Place]] = {}
        for place in export.places.values():
            self._places.setdefault(place.weights[0].block, []).append(place)

    def run(self, scratch: Path) -> None:
        """Finish all blocks; what was finished before is read only where a later block needs its outputs."""
        blocks = range(self._walk.last + 1)
        todo = [block for block in blocks if self._finished.recall(block) is None]
        if todo and self._walk.batches:
            self._with_data(scratch, until=todo[-1])
            blocks = blocks[todo[-1] + 1 :]
        for block in blocks:
            if not self._walk.recall(block):
                with _in_memory(self._streamed, self._walk.of(block)):
                    self._compress(block, lambda: iter(()), lambda number: torch.empty(0))
            self._tell(block)

    def _with_data(self, scratch: Path, *, until: int) -> None:
        found = [name for name, _ in self._walk.seen.blocks]
        if self._streamed.layers != found:
            raise InputError(f"{found[0]}: is not the first decoder layer; set runtime.streaming=off")
        batches = self._walk.batches
        forwards = [partial(self._forward, batch) for batch in batches]
        with LayerMajor(self._streamed, forwards, scratch=scratch) as passes:

            def watch() -> Iterator[int]:
                for number in range(len(batches)):
                    yield number
                    passes.rehearse(number)

            for block in passes.layers():
                if self._walk.recall(block):
                    self._finished.put_back(self._walk.of(block))
                else:
                    self._compress(block, watch, lambda number: collate(batches[number])[2].to(self._streamed.device))
                self._tell(block)
                if block == until:
                    break
                for number in range(len(batches)):
                    passes.advance(number)

    def _forward(self, batch: list[TokenSequence]) -> None:
        ids, attention, _ = (tensor.to(self._streamed.device) for tensor in collate(batch))
        self._streamed.model.base_model(input_ids=ids, attention_mask=attention, use_cache=False)

    def _compress(self, block: int, watch: Callable[[], Iterator[int]], counted: Callable[[int], torch.Tensor]) -> None:
        require_places(self._export.checkpoint, self._places.get(block, ()))
        self._walk.compress(block, watch, counted)
        give_back_freed_memory()

    def _tell(self, block: int) -> None:
        if self._on_progress is not None:
            self._on_progress(block + 1, self._walk.last + 1)


@contextmanager
def _in_memory(streamed: StreamedModel, weights: Sequence[Weight]) -> Iterator[None]:
    """Inside, these weights are read, and nothing else."""
    names = list(dict.fromkeys(map(parameter_of, weights)))
    streamed.fill(names)
    try:
        yield
    finally:
        streamed.empty(names)


Streaming = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class CompressJob:
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


def walked(walk: CompressJob, *, streaming: Streaming) -> Walked:
    """The checkpoint's weights after all methods. On a CPU the bits do not depend on `streaming`."""
    walk = replace(walk, device=device_of(walk.device))
    if streams(walk.checkpoint, walk.dtype, walk.device, streaming):
        size = sum(tensor.entry.size for tensor in walk.checkpoint.tensors)
        say(f"dense: {size / 1e9:,.1f} GB of weights are read block by block")
        return _job_streamed(walk)
    return _job_in_memory(walk)


def streams(checkpoint: Inventory, dtype: Dtype, device: str, streaming: Streaming) -> bool:
    """Whether blocks are read one by one: when told to, or when model and result, or what loading takes, do not fit."""
    if streaming != "auto":
        return streaming == "on"
    weights = number_bytes(dtype, device) * checkpoint.memory.elements
    return max(2 * weights, loading_bytes(weights, device)) > free_bytes(device)


def _job_in_memory(walk: CompressJob) -> Walked:
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


def _job_streamed(walk: CompressJob) -> Walked:
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
