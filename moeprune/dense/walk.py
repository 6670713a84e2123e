"""Compress a model in memory, block by block, on what the already compressed blocks before feed the next one."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moeprune.artifacts.errors import InputError
from moeprune.data.trajectories import Sequence as TokenSequence
from moeprune.data.trajectories import TokenSet, collate, plan_batches
from moeprune.dense.chain import Chain, chains, name_of, through
from moeprune.dense.finished import Finished, identity_of, weights_told
from moeprune.dense.methods.kinds import Needs
from moeprune.dense.methods.method import DenseMethod
from moeprune.dense.methods.result import Grid
from moeprune.dense.observe import Observer
from moeprune.dense.report import DenseReport, Stage, coverage, summarised
from moeprune.dense.weights import Seen, Weight, look
from moeprune.models.streaming.turns import Turns

Progress = Callable[[int, int], None]  # (blocks done, blocks in all)
Watch = Callable[[], Iterable[int]]  # runs the block for every batch, and gives its number before
Counted = Callable[[int], torch.Tensor]  # which tokens (batch, length) bool of a batch count
STATISTICS_BYTES = 8 << 30


@dataclass(frozen=True)
class Compressed:
    """What a walk leaves."""

    report: DenseReport
    grids: Mapping[str, Grid]  # weight name -> how it is quantised; only of quantised weights
    # weight name -> (out, in) as stored, of every compressed one; None: they are in the model
    weights: Mapping[str, torch.Tensor] | None = None


def compress_model(
    model: Any,
    methods: Sequence[DenseMethod],
    tokens: TokenSet | None = None,
    *,
    batch_tokens: int = 8192,
    dtype: torch.dtype | None = None,
    statistics_bytes: int = STATISTICS_BYTES,
    state: Path | None = None,
    on_progress: Progress | None = None,
) -> Compressed:
    """Run the methods over the model's weights in place; a weight goes through the methods that target it, in order.

    A block's statistics come from its own weights as they were and from inputs that the compressed blocks before made.
    tokens: calibration data, needed unless all methods look at weights alone; padding and uncounted tokens never enter,
    and every counted token weighs the same whatever its domain.
    dtype: of the checkpoint to be written, when the model is held in a wider one; weights and scales are exact in it.
    statistics_bytes: how much one block's statistics may take; a block that needs more is watched in several rounds.
    state: a directory in which every finished block is kept; the same call on the unchanged model resumes there.
    Raises InputError before the first forward for targets that match nothing, refused orders, widths that do not fit,
    weights that are quantised already, and missing data; during the walk for NaN or infinity, with layer and record.
    """
    walk = Walk(look(model), methods, tokens, batch_tokens=batch_tokens, dtype=dtype, limit=statistics_bytes)
    changed = (weight for weight in walk.seen.weights if weight.name in walk.chains)
    finished = Finished(state, walk.identity(weights_told(changed)))
    walk.open(finished)
    grids: dict[str, Grid] = {}
    collated = [tuple(tensor.to(model.device) for tensor in collate(batch)) for batch in walk.batches]

    def forward(ids: torch.Tensor, attention: torch.Tensor) -> None:
        model.base_model(input_ids=ids, attention_mask=attention, use_cache=False)

    runs = [partial(forward, ids, attention) for ids, attention, _ in collated]
    with Turns([module for _, module in walk.seen.blocks], runs) as turns:
        for block in range(walk.last + 1):
            if walk.recall(block):
                finished.put_back(walk.of(block))
                grids |= {w.name: grid for w in walk.of(block) if (grid := finished.grid(w.name)) is not None}
            else:
                grids |= walk.compress(block, partial(turns.watch, block), lambda number: collated[number][2])
            if block < walk.last:
                turns.go_on(block)
            if on_progress is not None:
                on_progress(block + 1, walk.last + 1)
    return Compressed(walk.report(), grids)


class Walk:
    """What is to be done to the blocks of a model, and what has been. Whoever has the blocks drives it."""

    def __init__(
        self,
        seen: Seen,
        methods: Sequence[DenseMethod],
        tokens: TokenSet | None,
        *,
        batch_tokens: int,
        dtype: torch.dtype | None,
        limit: int,
    ) -> None:
        self.seen, self.methods, self.dtype, self._limit = seen, methods, dtype, limit
        self.chains = chains(seen, methods)
        _require_float(seen, self.chains)
        self.needs = _strongest(self.chains)
        sequences = tokens.sequences if tokens is not None and self.needs != "nothing" else ()
        if self.needs != "nothing":
            _require_tokens(sequences, self.chains)
        self._sequences, self._plan = sequences, plan_batches(sequences, batch_tokens) if sequences else []
        self._stages: list[Stage] = []
        self._warnings: list[str] = []
        self._finished: Finished | None = None

    def identity(self, model: Iterable[str]) -> str:
        """Of the walk's result; `model` says what it starts from."""
        methods = [*(method.model_dump_json() for method in self.methods), str(self.dtype)]
        return identity_of(model, methods, self._sequences, self._plan)

    def open(self, finished: Finished) -> None:
        """Say where finished blocks are kept."""
        self._finished = finished

    @property
    def batches(self) -> list[list[TokenSequence]]:
        """None where no method looks at data."""
        return [[self._sequences[i] for i in batch] for batch in self._plan]

    @property
    def last(self) -> int:
        """The last block in which something is to be done."""
        return max((weight.block for weight in self.seen.weights if weight.name in self.chains), default=-1)

    def of(self, block: int) -> list[Weight]:
        """The block's weights that something is done to; a tied one is done with the weight it follows."""
        weights = (weight for weight in self.seen.weights if weight.block == block)
        return [weight for weight in weights if weight.name in self.chains and weight not in self.seen.tied]

    def recall(self, block: int) -> bool:
        """Whether the block was finished before; if so its report is taken over."""
        assert self._finished is not None
        done = self._finished.recall(block)
        if done is not None:
            self._stages += done[0]
            self._warnings += done[1]
        return done is not None

    def compress(self, block: int, watch: Watch, counted: Counted) -> Mapping[str, Grid]:
        """Watch the block, compress its weights, and only then put them in place: all see the block as it was.

        What each is quantised by comes back; with a directory for finished blocks the weights are in it by then.
        """
        assert self._finished is not None
        draft = self._finished.draft(block)
        stages: list[Stage] = []
        warnings: list[str] = []
        for group in _rounds(self.of(block), self.needs, self._limit):
            observer = self._watched(group, watch, counted)
            for weight in group:
                done = through(weight, self.chains[weight.name], observer.take(weight), dtype=self.dtype)
                draft.add(weight.name, done.weight, done.grid)
                stages += done.stages
                warnings += done.warnings
        for weight in self.of(block):
            weight.write(draft.weight(weight.name))
        self._finished.commit(draft, stages, warnings)
        self._stages += stages
        self._warnings += warnings
        return draft.grids

    def _watched(self, group: list[Weight], watch: Watch, counted: Counted) -> Observer:
        tied = {follower: weight for follower, weight in self.seen.tied.items() if weight in group}
        observer = Observer(group, self.seen.experts, self.needs, tied=tied)
        with observer.watching():
            for number in watch():
                batch, rows = [self._sequences[i] for i in self._plan[number]], counted(number)
                observer.open_batch(rows, partial(_place, batch, rows.shape[1]))
        return observer

    def report(self) -> DenseReport:
        return DenseReport(tuple(self._stages), coverage(self.seen, self._stages), summarised(self._warnings))


def _strongest(found: Mapping[str, Chain]) -> Needs:
    """What the most demanding method must know."""
    needs = {method.needs for chain in found.values() for method in chain}
    return "hessian" if "hessian" in needs else "norms" if "norms" in needs else "nothing"


def _require_tokens(sequences: Iterable[TokenSequence], found: Mapping[str, Chain]) -> None:
    if not any(sequence.counted.any() for sequence in sequences):
        names = ", ".join(sorted({name_of(m) for chain in found.values() for m in chain if m.needs != "nothing"}))
        raise InputError(f"dense: {names} needs calibration tokens and there are none; name calibration.domains")


def _rounds(weights: list[Weight], needs: Needs, limit: int) -> Iterable[list[Weight]]:
    """The weights in runs whose Hessians fit the limit together; weights that share an input are counted apart."""
    if not weights:
        return
    group: list[Weight] = []
    size = 0
    for weight in weights:
        own = 4 * weight.shape[1] ** 2 if needs == "hessian" else 16 * weight.shape[1]
        if group and size + own > limit:
            yield group
            group, size = [], 0
        group.append(weight)
        size += own
    yield group


def _place(sequences: list[TokenSequence], length: int, position: int) -> str:
    """What a message calls a token of a padded batch."""
    sequence = sequences[position // length]
    return f"{sequence.domain}, trajectory {sequence.trajectory[:12]}, token {position % length}"


def _require_float(seen: Seen, found: Mapping[str, Chain]) -> None:
    for weight in seen.weights:
        if weight.name in found and weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise InputError(
                f"{weight.name}: stored as {weight.dtype}, quantised already; compress the unquantised checkpoint"
            )
