"""The walk over a checkpoint that is larger than memory: one decoder block's weights and statistics at a time.

export = foreseen_export(streamed, inventory(source), methods)      # refuses what `Export` refuses
result = compress_streamed(streamed, export, methods, tokens, state=folder)
export.edits(result)                                                # for the checkpoint writer

Every finished block is written to `state` at once; activations that wait do so there, too.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from moeprune.artifacts.errors import InputError
from moeprune.checkpoint.edits import Inventory
from moeprune.data.batches import collate
from moeprune.data.trajectories import Sequence as TokenSequence
from moeprune.data.trajectories import TokenSet
from moeprune.dense.export import Export, Layout
from moeprune.dense.method import DenseMethod
from moeprune.dense.order import chains
from moeprune.dense.places import Place, block_kinds, foresee, locate, parameter_of, require_places
from moeprune.dense.state import Finished, Lazily, files_told
from moeprune.dense.walk import STATISTICS_BYTES, Compressed, Progress, Walk
from moeprune.dense.weights import Weight, look
from moeprune.models.layer_major import LayerMajor
from moeprune.models.memory import give_back_freed_memory
from moeprune.models.streaming import StreamedModel

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
