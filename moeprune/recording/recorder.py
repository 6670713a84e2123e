"""Routing statistics of a model on a token set: the one pass that needs the model before selection."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.statistics import LayerStatistics, RoutingStatistics
from moeprune.data.trajectories import Sequence as TokenSequence
from moeprune.data.trajectories import TokenSet, collate, plan_batches
from moeprune.models.device_map import device_of_inputs, device_of_module
from moeprune.models.layers import MoELayer, find_moe_layers, model_fingerprint
from moeprune.recording.accumulate import LayerSums, StatisticsChoice
from moeprune.recording.checks import RecordingError, check_conservation, rebuilt
from moeprune.recording.commit import Commit, Sums, identity_of
from moeprune.recording.distributed import Team
from moeprune.recording.hooks import observed
from moeprune.recording.sample_rows import stream_of
from moeprune.recording.samples import Sampler

Progress = Callable[[int, int], None]  # (tokens done, tokens in all)


def record(
    model: Any,
    tokens: TokenSet,
    *,
    batch_tokens: int = 8192,
    statistics: StatisticsChoice = "default",
    partial: Path | None = None,
    commit_seconds: float = 30.0,
    manifest: Mapping[str, Any] | None = None,
    on_progress: Progress | None = None,
    team: Team | None = None,
) -> RoutingStatistics:
    """Routing statistics of every MoE layer, per domain, from one forward pass over the tokens.

    Padding never counts, so neither batch size nor order change the counts (float sums differ in the last bits).
    partial: directory in which whole batches are committed; the same call resumes there after a kill.
    manifest: further entries for the file's manifest (key, calibration section, model path).
    team: processes that share the batches; each returns the statistics of all.
    Raises InputError for a model without MoE layers or a token set without counted tokens, RecordingError when the
    parts do not rebuild the block, a layer loses routed slots, or an expert's output is not finite.
    """
    layers = find_moe_layers(model)
    fingerprint = model_fingerprint(model, layers)
    recording = Recording(model, layers, tokens, statistics, device=device_of_inputs(model), fingerprint=fingerprint)
    all_batches = plan_batches(tokens.sequences, batch_tokens)
    batches = recording.share(all_batches, team)
    folder = partial if team is None else team.folder(partial)
    report = on_progress if team is None else team.watching(on_progress)
    commit = Commit(folder, recording.identity(batches), commit_seconds=commit_seconds)
    done = recording.resume(commit)
    with torch.no_grad(), observed(layers, recording.observe):
        for number, batch in enumerate(batches[done:], start=done):
            with ExitStack() as stack:
                if number == done:  # the first batch of every process proves the hooks
                    stack.enter_context(rebuilt(layers))
                ids, attention = stack.enter_context(recording.batch(batch, layers))
                # No lm_head: logits are not needed.
                model.base_model(input_ids=ids, attention_mask=attention, use_cache=False)
            commit.write(recording.sums, number + 1)
            if report is not None:
                report(recording.size(batches[: number + 1]), recording.size(batches))
    recording.check(batches)
    if team is not None:
        recording.add_up(team, all_batches)
    return recording.result(manifest or {})


class Recording:
    """The state of one pass: sums per stream and layer, and the batch that is running.

    Raises InputError when no token counts.
    """

    def __init__(
        self,
        model: Any,
        layers: list[MoELayer],
        tokens: TokenSet,
        statistics: StatisticsChoice,
        *,
        device: torch.device,
        fingerprint: str,
    ) -> None:
        if not any(sequence.counted.any() for sequence in tokens.sequences):
            raise InputError("calibration: no counted token in the whole set; nothing would be measured")
        self.layers, self._tokens, self._statistics, self._device = layers, tokens, statistics, device
        self._config, self._dtype, self.fingerprint = model.config, str(model.dtype), fingerprint
        self._hidden = int(model.config.get_text_config().hidden_size)
        self._sampler = Sampler(layers, tokens, self._hidden, device) if statistics == "samples" else None
        self.sums: Sums = {}
        self._target: dict[str, LayerSums] = {}
        self._counted: torch.Tensor | None = None
        self._seen: list[str] = []

    def identity(self, batches: Sequence[Sequence[object]]) -> str:
        """A digest of everything that decides which numbers are added in which order."""
        tokens = _digest(self._tokens.sequences)
        return identity_of([self.fingerprint, self._dtype, self._statistics, tokens, batches])

    def share(self, batches: list[list[int]], team: Team | None) -> list[list[int]]:
        """The batches that this process records."""
        return batches if team is None else team.share(batches, [self.size([batch]) for batch in batches])

    def add_up(self, team: Team, batches: Sequence[Sequence[int]]) -> None:
        """Make the sums those of all processes, which have recorded these batches."""
        for domain in self._tokens.manifest:
            for even in (True, False):
                self.sums.setdefault((domain, even), self._new_sums(domain, even))
        team.add_up(self.sums)
        self.check(batches)

    def resume(self, commit: Commit) -> int:
        """Restore the committed sums; returns how many steps they hold."""
        self.sums, done = commit.restore(self._new_sums)
        return done

    def size(self, batches: Sequence[Sequence[int]]) -> int:
        """Tokens, padding apart."""
        return sum(len(self._tokens.sequences[index].ids) for batch in batches for index in batch)

    def inputs(self, batch: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ids, attention mask and what counts, each (sequences, length), on the device."""
        ids, attention, counted = collate([self._tokens.sequences[index] for index in batch])
        return ids.to(self._device), attention.to(self._device), counted.to(self._device)

    @contextmanager
    def batch(self, batch: Sequence[int], layers: Sequence[MoELayer]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Ids and attention mask of a batch; inside, the outputs of these layers' experts are added to its stream.

        Raises RecordingError when a layer was not called once, in order.
        """
        stream = stream_of(self._tokens.sequences[batch[0]])
        if stream not in self.sums:
            self.sums[stream] = self._new_sums(*stream)
        ids, attention, counted = self.inputs(batch)
        self._target, self._seen = self.sums[stream], []
        self._counted = None if bool(counted.all()) else counted.reshape(-1)
        with ExitStack() as stack:
            if self._sampler is not None:
                rows = {layer.name: sums.sample for layer in layers if (sums := self._target[layer.name]).sample}
                stack.enter_context(self._sampler.batch(batch, ids.shape[1], layers, rows))
            yield ids, attention
        if self._seen != [layer.name for layer in layers]:
            missing = sorted({layer.name for layer in layers} - set(self._seen)) or self._seen
            raise RecordingError(f"the forward pass did not call every MoE layer once, in order: {missing}")

    def observe(
        self, layer: MoELayer, rows: slice, index: torch.Tensor, gates: torch.Tensor, outputs: torch.Tensor
    ) -> None:
        sums = self._target[layer.name]
        counted = None if self._counted is None else self._counted[rows].to(index.device)
        sums.add(index, gates, outputs, counted)
        if not bool(torch.isfinite(sums.norm_square_sum).all()):
            raise RecordingError(
                f"{layer.name}: an expert's output is not finite in this batch; check the model and its dtype"
            )
        if rows.start == 0:
            self._seen.append(layer.name)

    def check(self, batches: Sequence[Sequence[int]]) -> None:
        """Every layer saw every counted token of these batches. Raises RecordingError naming the layer."""
        expected = dict.fromkeys(self.sums, 0)
        for sequence in (self._tokens.sequences[index] for batch in batches for index in batch):
            expected[stream_of(sequence)] += int(sequence.counted.sum())
        for stream, tokens in expected.items():
            check_conservation(self.layers, [self.sums[stream][layer.name] for layer in self.layers], tokens)

    def _new_sums(self, domain: str, even: bool) -> dict[str, LayerSums]:
        return {
            layer.name: LayerSums(
                layer.info,
                device=device_of_module(layer.experts, self._device),
                hidden=self._hidden,
                statistics=self._statistics,
                sample=None if self._sampler is None else self._sampler.new_rows(layer, domain, even=even),
            )
            for layer in self.layers
        }

    def result(self, manifest: Mapping[str, Any]) -> RoutingStatistics:
        """The statistics, with the manifest that explains them."""
        model = {"model_type": self._config.model_type, "fingerprint": self.fingerprint, "dtype": self._dtype}
        whole: dict[str, dict[str, LayerStatistics]] = {}
        half: dict[str, dict[str, LayerStatistics]] = {}
        for domain in self._tokens.manifest:
            even, odd = (self.sums.get((domain, flag)) or self._new_sums(domain, flag) for flag in (True, False))
            half[domain] = {name: total.statistics() for name, total in even.items()}
            whole[domain] = {name: half[domain][name] + odd[name].statistics() for name in half[domain]}
        complete = {
            **manifest,
            "model": {**model, **manifest.get("model", {})},
            "statistics": self._statistics,
            "half_trajectories": "sha256 of the token ids is even",
            "domains": dict(self._tokens.manifest),
        }
        return RoutingStatistics(complete, tuple(layer.info for layer in self.layers), whole, half)


def _digest(sequences: Sequence[TokenSequence]) -> str:
    digest = hashlib.sha256()
    for sequence in sequences:
        digest.update(sequence.domain.encode() + sequence.ids.tobytes() + sequence.counted.tobytes())
    return digest.hexdigest()
