"""The blocks of a model, compressed one after the other on what the compressed blocks before feed the next one."""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moeprune.artifacts.errors import InputError
from moeprune.data.trajectories import Sequence as TokenSequence
from moeprune.data.trajectories import TokenSet, collate, plan_batches
from moeprune.dense.chain import Chain, apply, chains, name_of
from moeprune.dense.finished import FILE_BYTES, Finished, Lazily, identity_of, identity_of_weights
from moeprune.dense.methods.kinds import Needs
from moeprune.dense.methods.method import DenseMethod
from moeprune.dense.methods.result import Quantised
from moeprune.dense.observe import Observer
from moeprune.dense.report import DenseReport, Step, coverage, summarised
from moeprune.dense.weights import Seen, Weight, look
from moeprune.models.streaming.turns import Turns

Progress = Callable[[int, int], None]  # (blocks done, blocks in all)
Watch = Callable[[], Iterable[int]]  # gives the number of every batch, each time before the block runs for it
Blocks = Generator[tuple[int, Watch], None, None]  # blocks in order, each in memory until the next is asked for
STATISTICS_BYTES = 8 << 30


@dataclass(frozen=True)
class Compressed:
    """What a walk leaves."""

    report: DenseReport
    quantised: Mapping[str, Quantised]  # weight name -> how it is quantised; only of quantised weights
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
    walk = Walk(
        look(model), methods, tokens, batch_tokens=batch_tokens, dtype=dtype, device=model.device,
        statistics_bytes=statistics_bytes, state=state,
    )  # fmt: skip

    def blocks() -> Blocks:
        with Turns([module for _, module in walk.seen.blocks], walk.forwards(model)) as turns:
            for block in range(walk.last + 1):
                yield block, partial(turns.watch, block)
                if block < walk.last:
                    turns.go_on(block)

    return walk.run(blocks(), on_progress)


class Walk:
    """What is to be done to the blocks of a model, and what has been done. Whoever has the blocks hands them in.

    source: lines that identify the weights it starts from (default: the names and sums of those that change).
    state: a directory for finished blocks; an earlier walk of the same identity goes on there.
    """

    def __init__(
        self,
        seen: Seen,
        methods: Sequence[DenseMethod],
        tokens: TokenSet | None,
        *,
        batch_tokens: int,
        dtype: torch.dtype | None,
        device: torch.device,
        statistics_bytes: int,
        state: Path | None,
        source: Iterable[str] | None = None,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        self.seen, self.chains = seen, chains(seen, methods)
        self._dtype, self._device, self._statistics_bytes = dtype, device, statistics_bytes
        _require_float(seen, self.chains)
        self._needs = _strongest(self.chains)
        sequences = tokens.sequences if tokens is not None and self._needs != "nothing" else ()
        if self._needs != "nothing":
            _require_tokens(sequences, self.chains)
        plan = plan_batches(sequences, batch_tokens) if sequences else []
        self.batches = [[sequences[i] for i in batch] for batch in plan]  # empty where no method looks at data
        if source is None:
            source = identity_of_weights(weight for weight in seen.weights if weight.name in self.chains)
        options = [*(method.model_dump_json() for method in methods), str(dtype)]
        self.finished = Finished(state, identity_of(source, options, sequences, plan), file_bytes=file_bytes)
        self._steps: list[Step] = []
        self._warnings: list[str] = []

    @property
    def last(self) -> int:
        """The last block in which something is to be done."""
        return max((weight.block for weight in self.seen.weights if weight.name in self.chains), default=-1)

    @property
    def open(self) -> list[int]:
        """The blocks that are not finished."""
        return [block for block in range(self.last + 1) if self.finished.recall(block) is None]

    def of(self, block: int) -> list[Weight]:
        """The block's weights that something is done to; a tied one is done with the weight it follows."""
        weights = (weight for weight in self.seen.weights if weight.block == block)
        return [weight for weight in weights if weight.name in self.chains and weight not in self.seen.tied]

    @property
    def names(self) -> list[str]:
        """Of all weights that something is done to."""
        return [weight.name for block in range(self.last + 1) for weight in self.of(block)]

    def forwards(self, model: Any) -> list[Callable[[], None]]:
        """A forward pass of the model for every batch."""

        def forward(batch: Sequence[TokenSequence]) -> None:
            ids, attention, _ = (tensor.to(self._device) for tensor in collate(batch))
            model.base_model(input_ids=ids, attention_mask=attention, use_cache=False)

        return [partial(forward, batch) for batch in self.batches]

    def run(self, blocks: Blocks, on_progress: Progress | None = None) -> Compressed:
        """Finish every block; one that was finished before is put back where it is in memory."""
        with closing(blocks):
            for block, watch in blocks:
                done = self.finished.recall(block)
                if done is None:
                    done = self._compress(block, watch)
                else:
                    self.finished.put_back(self.of(block))
                self._steps += done[0]
                self._warnings += done[1]
                if on_progress is not None:
                    on_progress(block + 1, self.last + 1)
        report = DenseReport(tuple(self._steps), coverage(self.seen, self._steps), summarised(self._warnings))
        quantised = [name for name in self.names if self.finished.quantised(name) is not None]
        return Compressed(report, Lazily(quantised, self.finished.quantised))

    def _compress(self, block: int, watch: Watch) -> tuple[list[Step], list[str]]:
        """Watch the block, compress its weights, and only then put them in place: all see the block as it was.

        Its report and warnings; with a directory for finished blocks the weights are in it by then.
        """
        draft = self.finished.draft(block)
        steps: list[Step] = []
        warnings: list[str] = []
        for group in _rounds(self.of(block), self._needs, self._statistics_bytes):
            observer = self._observed(group, watch)
            for weight in group:
                done = apply(weight, self.chains[weight.name], observer.take(weight), dtype=self._dtype)
                draft.add(weight.name, done.weight, done.quantised)
                steps += done.steps
                warnings += done.warnings
        for weight in self.of(block):
            weight.write(draft.weight(weight.name))
        self.finished.commit(draft, steps, warnings)
        return steps, warnings

    def _observed(self, group: list[Weight], watch: Watch) -> Observer:
        """An observer that has seen all batches reach these weights."""
        tied = {follower: weight for follower, weight in self.seen.tied.items() if weight in group}
        observer = Observer(group, self.seen.experts, self._needs, tied=tied)
        with observer.watching():
            for number in watch():
                batch = self.batches[number]
                counted = collate(batch)[2].to(self._device)
                observer.open_batch(counted, partial(_place, batch, counted.shape[1]))
        return observer


def _strongest(chain_of: Mapping[str, Chain]) -> Needs:
    """What the most demanding method must know."""
    needs = {method.needs for chain in chain_of.values() for method in chain}
    return "hessian" if "hessian" in needs else "norms" if "norms" in needs else "nothing"


def _require_tokens(sequences: Iterable[TokenSequence], chain_of: Mapping[str, Chain]) -> None:
    if not any(sequence.counted.any() for sequence in sequences):
        names = ", ".join(sorted({name_of(m) for chain in chain_of.values() for m in chain if m.needs != "nothing"}))
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


def _require_float(seen: Seen, chain_of: Mapping[str, Chain]) -> None:
    for weight in seen.weights:
        if weight.name in chain_of and weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise InputError(
                f"{weight.name}: stored as {weight.dtype}, quantised already; compress the unquantised checkpoint"
            )
