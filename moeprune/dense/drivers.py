"""A checkpoint's weights after all methods, with the model in memory or one decoder block of it at a time.

export = foreseen_export(streamed, inventory(source), methods)      # refuses what `Export` refuses
result = compress_streamed(streamed, export, methods, tokens, state=folder)
export.edits(result)                                                # for the checkpoint writer

Every finished block is written to `state` at once; activations that wait do so there, too.
"""

import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import existing_parent
from moeprune.checkpoint.inventory import Inventory
from moeprune.checkpoint.options import Layout
from moeprune.console import progress, say
from moeprune.data.trajectories import TokenSet
from moeprune.dense.chain import chains
from moeprune.dense.export import Export
from moeprune.dense.finished import Lazily, identity_of_files
from moeprune.dense.methods.method import DenseMethod
from moeprune.dense.places import StoredAs, block_kinds, foresee, locate, parameter_of, require_places
from moeprune.dense.reload import Reloaded, require_reloads, require_reloads_streamed
from moeprune.dense.walk import STATISTICS_BYTES, Blocks, Compressed, Progress, Walk, compress_model
from moeprune.dense.weights import Weight, look
from moeprune.models.layers import moe_layers_if_any
from moeprune.models.loading import align, device_of, number_bytes, pretrained, without_bars
from moeprune.models.memory import free_bytes, give_back_freed_memory, loading_bytes
from moeprune.models.options import Dtype, ModelOptions
from moeprune.models.streaming.model import StreamedModel, affordable_tokens, affordable_tokens_in_memory, open_streamed
from moeprune.models.streaming.passes import LayerMajor

LEAST_STATISTICS = 2**28  # bytes that are always affordable
Streaming = Literal["auto", "on", "off"]


def foreseen_export(
    streamed: StreamedModel, checkpoint: Inventory, methods: Sequence[DenseMethod], *, layout: Layout = "auto"
) -> Export:
    """`Export` of a model that is not in memory: one block of each kind is read to see where its weights lie."""
    seen = look(streamed.model)
    chain_of = chains(seen, methods)
    examples: list[StoredAs] = []
    for block in block_kinds(seen, chain_of):
        weights = [weight for weight in seen.weights if weight.block == block and weight.name in chain_of]
        with _in_memory(streamed, weights):
            examples += locate(checkpoint, seen, [weight.name for weight in weights]).values()
    return Export(
        checkpoint, streamed.model, methods, layout=layout, places=foresee(checkpoint, seen, chain_of, examples)
    )


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
    walk = Walk(
        look(streamed.model), methods, tokens, batch_tokens=batch_tokens, dtype=export.dtype, device=streamed.device,
        statistics_bytes=min(STATISTICS_BYTES, max(LEAST_STATISTICS, streamed.layer_bytes)), state=state,
        source=identity_of_files(export.checkpoint.directory / name for name in export.checkpoint.shards),
        file_bytes=max(2**24, streamed.layer_bytes // 16),
    )  # fmt: skip
    compressed = walk.run(_blocks(streamed, export, walk, state / "waiting"), on_progress)
    return Compressed(compressed.report, compressed.quantised, Lazily(walk.names, walk.finished.weight))


def _blocks(streamed: StreamedModel, export: Export, walk: Walk, scratch: Path) -> Blocks:
    """The walk's blocks, one in memory at a time; a finished one only where a later one needs what it puts out."""
    places: dict[int, list[StoredAs]] = {}
    for stored in export.places.values():
        places.setdefault(stored.weights[0].block, []).append(stored)
    unfinished = walk.open
    start = 0
    if unfinished and walk.batches:
        start = unfinished[-1] + 1
        numbers = range(len(walk.batches))
        with LayerMajor(streamed, walk.forwards(streamed.model), scratch=scratch) as passes:

            def watch() -> Iterator[int]:
                for number in numbers:
                    yield number
                    passes.rehearse(number)

            for block in passes.layers():
                if block in unfinished:
                    require_places(export.checkpoint, places.get(block, ()))
                yield block, watch
                give_back_freed_memory()
                if block + 1 == start:
                    break
                for number in numbers:
                    passes.advance(number)
    for block in range(start, walk.last + 1):
        with _in_memory(streamed, walk.of(block) if block in unfinished else ()):
            if block in unfinished:
                require_places(export.checkpoint, places.get(block, ()))
            yield block, lambda: ()
            give_back_freed_memory()


@contextmanager
def _in_memory(streamed: StreamedModel, weights: Sequence[Weight]) -> Iterator[None]:
    """Inside, these weights are read, and nothing else."""
    names = list(dict.fromkeys(map(parameter_of, weights)))
    streamed.fill(names)
    try:
        yield
    finally:
        streamed.empty(names)


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
    # compares a written directory with it; names in it that transformers does not load
    reload: Callable[[Path, Collection[str]], Reloaded]


def walked(job: CompressJob, *, streaming: Streaming) -> Walked:
    """The checkpoint's weights after all methods. On a CPU the bits do not depend on `streaming`."""
    checkpoint, device, limit = job.checkpoint, device_of(job.device), job.batch_tokens
    compress: Callable[..., Compressed]
    streamed: StreamedModel | None = None
    if streams(checkpoint, job.dtype, device, streaming):
        size = checkpoint.tensor_bytes
        say(f"dense: {size / 1e9:,.1f} GB of weights are read block by block")
        streamed = open_streamed(ModelOptions(path=str(checkpoint.directory), dtype=job.dtype), device=device)
        model = streamed.model
        export = foreseen_export(streamed, checkpoint, job.methods, layout=job.layout)
        limit = min(limit, affordable_tokens(streamed, moe_layers_if_any(model)))
        compress = partial(compress_streamed, streamed, export)
    else:
        with without_bars():
            model = pretrained(checkpoint.directory, job.dtype, device=device).to(device)
        align(model)
        export = Export(checkpoint, model, job.methods, layout=job.layout)
        if device == "cpu":  # no slower there, and what a streamed walk takes
            limit = min(limit, affordable_tokens_in_memory(model, moe_layers_if_any(model)))
        compress = partial(compress_model, model, dtype=export.dtype)
    require_room(export, job.state)
    with progress("compressing", unit="blocks") as advance:
        compressed = compress(job.methods, job.tokens, state=job.state, batch_tokens=limit, on_progress=advance)

    def compare(directory: Path, unused: Collection[str]) -> Reloaded:
        if streamed is None:
            return require_reloads(directory, model, compressed.report, unused=unused)
        return require_reloads_streamed(
            directory,
            checkpoint.directory,
            compressed,
            dtype=export.dtype,
            scratch=job.state / "waiting",
            unused=unused,
        )

    return Walked(export, compressed, compare)


def streams(checkpoint: Inventory, dtype: Dtype, device: str, streaming: Streaming) -> bool:
    """Whether blocks are read one by one: when told to, or when model and result, or what loading takes, do not fit."""
    if streaming != "auto":
        return streaming == "on"
    weights = number_bytes(dtype, device) * checkpoint.memory.elements
    return max(2 * weights, loading_bytes(weights, device)) > free_bytes(device)


def require_room(export: Export, state: Path) -> None:
    """Raises InputError when the disk of `state` has no room for the walk's results and, beside them, the checkpoint.

    Results wait there as plain numbers in the checkpoint's dtype.
    """
    waiting = export.dtype.itemsize * export.elements
    present = sum(path.stat().st_size for path in state.rglob("*.safetensors")) if state.is_dir() else 0
    before, after = export.replaced_bytes
    written = export.checkpoint.tensor_bytes - before + after
    needed, free = max(0, waiting - present) + written, shutil.disk_usage(existing_parent(state)).free
    if needed > free:
        raise InputError(
            f"{state.parent}: {needed / 2**30:.2f} GiB are needed there ({waiting / 2**30:.2f} of them until all "
            f"blocks are done) and {free / 2**30:.2f} GiB are free; make room or give a directory on another disk"
        )
