"""Routing statistics of a model that is larger than memory: all batches through one decoder layer after the other."""

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from moeprune.artifacts.statistics import RoutingStatistics
from moeprune.data.trajectories import TokenSet, plan_batches
from moeprune.models.layers import find_moe_layers, router_weight
from moeprune.models.layers import fingerprint as fingerprint_of
from moeprune.models.streaming.model import StreamedModel, affordable_tokens
from moeprune.models.streaming.passes import LayerMajor
from moeprune.models.streaming.waiting import Border, NotResumable
from moeprune.recording.accumulate import StatisticsChoice
from moeprune.recording.checks import RecordingError, rebuilt
from moeprune.recording.commit import Commit
from moeprune.recording.distributed import Team
from moeprune.recording.hooks import observed
from moeprune.recording.recorder import Progress, Recording

# Batches side by side, each a thread that waits. More batches are taken in rounds; each round reads the weights.
ROUND = 1024


def record_streamed(
    streamed: StreamedModel,
    tokens: TokenSet,
    *,
    fingerprint: str,
    batch_tokens: int = 8192,
    statistics: StatisticsChoice = "default",
    partial: Path | None = None,
    commit_seconds: float = 30.0,
    manifest: Mapping[str, Any] | None = None,
    on_progress: Progress | None = None,
    team: Team | None = None,
) -> RoutingStatistics:
    """What `record` gives, bit for bit on a CPU, with one decoder layer in memory at a time.

    fingerprint: of the checkpoint; the routers that were read are compared with it.
    partial: directory for activations between two layers, and for the sums and activations committed at layer
    borders; the same call resumes there after a kill. Without it both lie in the system's temporary directory.
    team: processes that share the batches; each reads all weights, and returns the statistics of all batches.
    Raises what `record` raises, and StreamingError when the model does not call its layers once each, in order.
    """
    layers = find_moe_layers(streamed.model)
    recording = Recording(streamed.model, layers, tokens, statistics, device=streamed.device, fingerprint=fingerprint)
    all_batches = plan_batches(tokens.sequences, min(batch_tokens, affordable_tokens(streamed, layers)))
    batches = recording.share(all_batches, team)
    partial = partial if team is None else team.folder(partial)
    report = on_progress if team is None else team.watching(on_progress)
    commit = Commit(partial, recording.identity([["layer by layer"], *batches]), commit_seconds=commit_seconds)
    with ExitStack() as stack:
        folder = partial or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moeprune-")))
        passes = _Passes(streamed, recording, batches, folder, commit if partial else None, report)
        try:
            passes.run(recording.resume(commit))
        except NotResumable:  # committed by another release of transformers, for example
            recording.sums = {}
            passes.run(0)
    passes.check_routers()
    recording.check(batches)
    if team is not None:
        recording.add_up(team, all_batches)
    return recording.result(manifest or {})


class _Passes:
    """All batches, in rounds, through all layers. A step is one decoder layer of one round."""

    def __init__(
        self,
        streamed: StreamedModel,
        recording: Recording,
        batches: Sequence[Sequence[int]],
        folder: Path,
        commit: Commit | None,
        on_progress: Progress | None,
    ) -> None:
        self._streamed, self._recording, self._folder, self._state = streamed, recording, folder, commit
        self._rounds = [batches[start : start + ROUND] for start in range(0, len(batches), ROUND)]
        self._on_progress = on_progress
        self._moe = [[la for la in recording.layers if la.is_in(name)] for name in streamed.layers]
        self._routers: dict[str, np.ndarray] = {}
        lost = {layer.name for layer in recording.layers} - {layer.name for moe in self._moe for layer in moe}
        if lost:
            raise RecordingError(f"{sorted(lost)[0]}: lies in no decoder layer; set runtime.streaming=off")

    def run(self, step: int) -> None:
        """Do every step from this one on."""
        first, position = divmod(step, len(self._streamed.layers))
        for number in range(first, len(self._rounds)):
            border = Border(self._border(step), position) if position else None
            self._round(number, border)
            position = 0

    def _round(self, number: int, border: Border | None) -> None:
        batches = self._rounds[number]
        forwards = [self._forward(batch) for batch in batches]
        with LayerMajor(self._streamed, forwards, scratch=self._folder / "waiting") as passes:
            for position in passes.layers(border):
                self._layer(passes, number, position)
                self._commit(passes, number * len(self._streamed.layers) + position + 1)

    def _forward(self, batch: Sequence[int]) -> Callable[[], Any]:
        base = self._streamed.model.base_model  # no lm_head: logits are not needed

        def forward() -> None:
            ids, attention, _ = self._recording.inputs(batch)
            base(input_ids=ids, attention_mask=attention, use_cache=False)

        return forward

    def _layer(self, passes: LayerMajor, number: int, position: int) -> None:
        layers = self._moe[position]
        self._routers |= {layer.name: router_weight(layer).detach().float().cpu().numpy() for layer in layers}
        with observed(layers, self._recording.observe):
            for index, batch in enumerate(self._rounds[number]):
                with ExitStack() as stack:
                    if index == 0:  # the first batch proves the hooks, in every layer
                        stack.enter_context(rebuilt(layers))
                    stack.enter_context(self._recording.batch(batch, layers))
                    passes.advance(index)
                self._tell(number, position, index)

    def _tell(self, number: int, position: int, index: int) -> None:
        """Progress in tokens; a token is done when it has been through all layers."""
        if self._on_progress is not None:
            size, batches, layers = self._recording.size, self._rounds[number], len(self._streamed.layers)
            before = sum(map(size, self._rounds[:number]))
            inside = position * size(batches) + size(batches[: index + 1])
            self._on_progress(before + inside // layers, sum(map(size, self._rounds)))

    def _border(self, step: int) -> Path:
        return self._folder / f"border-{step:06d}"

    def _commit(self, passes: LayerMajor, step: int) -> None:
        """Write the sums of the finished steps and, inside a round, the activations of its batches."""
        if self._state is None or not self._state.due:
            return
        started = time.monotonic()
        position = step % len(self._streamed.layers)
        if position and not passes.save(Border(self._border(step), position)):
            return
        self._state.write(self._recording.sums, step, cost=time.monotonic() - started)
        for older in self._folder.glob("border-*"):
            if older != self._border(step):
                shutil.rmtree(older)

    def check_routers(self) -> None:
        """Raise RecordingError when the weights that were read are not those of the checkpoint."""
        recording = self._recording
        if len(self._routers) == len(recording.layers):  # a resumed pass has not read all
            infos = [layer.info for layer in recording.layers]
            weights = [self._routers[layer.name] for layer in recording.layers]
            fingerprint = fingerprint_of(self._streamed.model.config.model_type, infos, weights)
            if fingerprint != recording.fingerprint:
                raise RecordingError(
                    f"the routers that were read have fingerprint {fingerprint}, the checkpoint has "
                    f"{recording.fingerprint}"
                )
