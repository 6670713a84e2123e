"""Compress a model in memory, block by block, on what the already compressed blocks before feed the next one."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moeprune.artifacts.errors import InputError
from moeprune.data.batches import collate, plan_batches
from moeprune.data.trajectories import Sequence as TokenSequence
from moeprune.data.trajectories import TokenSet
from moeprune.dense.method import DenseMethod, Needs
from moeprune.dense.observe import Observer
from moeprune.dense.order import Chain, chains, name_of
from moeprune.dense.report import DenseReport, Stage, coverage, summarised
from moeprune.dense.result import Grid
from moeprune.dense.stages import through
from moeprune.dense.state import Finished, identity_of
from moeprune.dense.turns import Turns
from moeprune.dense.weights import Seen, Weight, look

Progress = Callable[[int, int], None]  # (blocks done, blocks in all)


@dataclass(frozen=True)
class Compressed:
    """What a walk leaves beside the changed model."""

    report: DenseReport
    grids: dict[str, Grid]  # weight name -> how it is quantised; only of quantised weights


def compress_model(
    model: Any,
    methods: Sequence[DenseMethod],
    tokens: TokenSet | None = None,
    *,
    batch_tokens: int = 8192,
    dtype: torch.dtype | None = None,
    statistics_bytes: int = 8 << 30,
    state: Path | None = None,
    on_progress: Progress | None = None,
) -> Compressed:
    """Run the methods over the model's weights in place; a weight goes through the methods that target it, in order.

    A block's statistics come from its own weights as they were and from inputs that the compressed blocks before made.
    tokens: calibration data, needed unless all methods look at weights alone; padding and uncounted tokens never enter.
    dtype: of the checkpoint to be written, when the model is held in a wider one; weights and scales are exact in it.
    statistics_bytes: how much one block's statistics may take; a block that needs more is watched in several rounds.
    state: a directory in which every finished block is kept; the same call on the unchanged model resumes there.
    Raises InputError before the first forward for targets that match nothing, refused orders, widths that do not fit,
    weights that are quantised already, and missing data; during the walk for NaN or infinity, with layer and record.
    """
    seen = look(model)
    found = chains(seen, methods)
    _require_float(seen, found)
    needs: set[Needs] = {method.needs for chain in found.values() for method in chain}
    strongest: Needs = "hessian" if "hessian" in needs else "norms" if "norms" in needs else "nothing"
    sequences = tokens.sequences if tokens is not None else ()
    if strongest != "nothing" and not any(sequence.counted.any() for sequence in sequences):
        names = ", ".join(sorted({name_of(m) for chain in found.values() for m in chain if m.needs != "nothing"}))
        raise InputError(f"dense: {names} needs calibration tokens and there are none; name calibration.domains")
    batches = plan_batches(sequences, batch_tokens) if strongest != "nothing" else []
    walk = _Walk(model, seen, found, strongest, statistics_bytes, dtype)
    identity = identity_of(
        (weight for weight in seen.weights if weight.name in found),
        [*(method.model_dump_json() for method in methods), str(dtype)],
        sequences if strongest != "nothing" else (),
        batches,
    )
    walk.run([[sequences[i] for i in batch] for batch in batches], Finished(state, identity), on_progress)
    return walk.compressed()


class _Walk:
    """One pass over the blocks: what is to be done, and what has been."""

    def __init__(
        self,
        model: Any,
        seen: Seen,
        found: dict[str, Chain],
        needs: Needs,
        statistics_bytes: int,
        dtype: torch.dtype | None,
    ) -> None:
        self.model, self.seen, self.chains, self.needs = model, seen, found, needs
        self.statistics_bytes, self.dtype = statistics_bytes, dtype
        self.grids: dict[str, Grid] = {}
        self.stages: list[Stage] = []
        self.warnings: list[str] = []

    def run(self, batches: list[list[TokenSequence]], finished: Finished, on_progress: Progress | None) -> None:
        collated = [tuple(tensor.to(self.model.device) for tensor in collate(batch)) for batch in batches]
        runs = [partial(self._forward, ids, attention) for ids, attention, _ in collated]
        last = max((w.block for w in self.seen.weights if w.name in self.chains), default=-1)
        with Turns([module for _, module in self.seen.blocks], runs) as turns:
            for block in range(last + 1):
                if not self._restored(block, finished):
                    self._compress(block, turns, [counted for *_, counted in collated], batches, finished)
                if block < last:
                    turns.go_on(block)
                if on_progress is not None:
                    on_progress(block + 1, last + 1)

    def _forward(self, ids: torch.Tensor, attention: torch.Tensor) -> None:
        self.model.base_model(input_ids=ids, attention_mask=attention, use_cache=False)

    def _restored(self, block: int, finished: Finished) -> bool:
        done = finished.restore(block, {weight.name: weight for weight in self._of(block)})
        if done is None:
            return False
        grids, stages, warnings = done
        self.grids.update(grids)
        self.stages += stages
        self.warnings += warnings
        return True

    def _of(self, block: int) -> list[Weight]:
        """The block's weights that something is done to; a tied one is done with the weight it follows."""
        weights = (weight for weight in self.seen.weights if weight.block == block)
        return [weight for weight in weights if weight.name in self.chains and weight not in self.seen.tied]

    def _compress(
        self,
        block: int,
        turns: Turns,
        counted: list[torch.Tensor],
        batches: list[list[TokenSequence]],
        finished: Finished,
    ) -> None:
        """Watch the block, compress its weights, and only then put them in place: all see the block as it was."""
        new: dict[str, torch.Tensor] = {}
        grids: dict[str, Grid] = {}
        stages: list[Stage] = []
        warnings: list[str] = []
        weights = self._of(block)
        for group in _rounds(weights, self.needs, self.statistics_bytes):
            tied = {follower: weight for follower, weight in self.seen.tied.items() if weight in group}
            observer = Observer(group, self.seen.experts, self.needs, tied=tied)
            with observer.watching():
                for number in turns.watch(block):
                    observer.open_batch(counted[number], partial(_place, batches[number], counted[number].shape[1]))
            for weight in group:
                done = through(weight, self.chains[weight.name], observer.take(weight), dtype=self.dtype)
                new[weight.name], stages = done.weight, [*stages, *done.stages]
                warnings += done.warnings
                if done.grid is not None:
                    grids[weight.name] = done.grid
        for weight in weights:
            weight.write(new[weight.name])
        self.grids.update(grids)
        self.stages += stages
        self.warnings += warnings
        finished.commit(block, new, grids, stages, warnings)

    def compressed(self) -> Compressed:
        report = DenseReport(tuple(self.stages), coverage(self.seen, self.stages), summarised(self.warnings))
        return Compressed(report, self.grids)


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


def _require_float(seen: Seen, found: dict[str, Chain]) -> None:
    for weight in seen.weights:
        if weight.name in found and weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise InputError(
                f"{weight.name}: stored as {weight.dtype}, quantised already; compress the unquantised checkpoint"
            )
