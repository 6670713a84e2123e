"""Routing statistics of a model on a token set: the one pass that needs the model before selection."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.statistics import LayerStatistics, RoutingStatistics
from moeprune.data.batches import collate, plan_batches
from moeprune.data.trajectories import Sequence as TokenSequence
from moeprune.data.trajectories import TokenSet
from moeprune.models.layers import MoELayer, find_moe_layers, model_fingerprint
from moeprune.recording.accumulate import LayerSums, StatisticsChoice
from moeprune.recording.checks import RecordingError, check_conservation, rebuilt
from moeprune.recording.hooks import observed
from moeprune.recording.parts import Parts, Sums, identity_of

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
) -> RoutingStatistics:
    """Routing statistics of every MoE layer, per domain, from one forward pass over the tokens.

    Padding never counts, so neither batch size nor order change the counts (float sums differ in the last bits).
    partial: directory in which whole batches are committed; the same call resumes there after a kill.
    manifest: further entries for the file's manifest (key, calibration section, model path).
    Raises InputError for a model without MoE layers or a token set without counted tokens, RecordingError when the
    parts do not rebuild the block, a layer loses routed slots, or an expert's output is not finite.
    """
    layers = find_moe_layers(model)
    if not any(sequence.counted.any() for sequence in tokens.sequences):
        raise InputError("calibration: no counted token in the whole set; nothing would be measured")
    fingerprint = model_fingerprint(model, layers)
    recording = _Recording(model, layers, tokens.sequences, statistics)
    batches = plan_batches(tokens.sequences, batch_tokens)
    identity = identity_of([fingerprint, str(model.dtype), statistics, _digest(tokens.sequences), batches])
    parts = Parts(partial, identity, commit_seconds=commit_seconds)
    recording.run(batches, parts, on_progress)
    extra = dict(manifest or {})
    model_entry = {"model_type": model.config.model_type, "fingerprint": fingerprint, "dtype": str(model.dtype)}
    extra["model"] = {**model_entry, **extra.get("model", {})}
    extra |= {"statistics": statistics, "half_trajectories": "sha256 of the token ids is even"}
    return recording.result({**extra, "domains": dict(tokens.manifest)})


class _Recording:
    """The state of one pass: sums per (domain, half) and layer, and the batch that is running."""

    def __init__(
        self, model: Any, layers: list[MoELayer], sequences: Sequence[TokenSequence], statistics: StatisticsChoice
    ) -> None:
        self.model, self.layers, self.sequences, self.statistics = model, layers, sequences, statistics
        self.hidden = int(model.config.get_text_config().hidden_size)
        self.sums: Sums = {}
        self._target: dict[str, LayerSums] = {}
        self._counted: torch.Tensor | None = None
        self._seen: list[str] = []

    def run(self, batches: list[list[int]], parts: Parts, on_progress: Progress | None) -> None:
        self.sums, done = parts.restore(self._new_sums)
        total = sum(len(sequence.ids) for sequence in self.sequences)
        finished = sum(len(self.sequences[i].ids) for batch in batches[:done] for i in batch)
        with torch.no_grad(), observed(self.layers, self._observe):
            for number, batch in enumerate(batches[done:], start=done):
                with ExitStack() as stack:
                    if number == done:  # the first batch of every process proves the hooks
                        stack.enter_context(rebuilt(self.layers))
                    self._forward([self.sequences[i] for i in batch])
                parts.commit(self.sums, number + 1)
                finished += sum(len(self.sequences[i].ids) for i in batch)
                if on_progress is not None:
                    on_progress(finished, total)
        for domain, even in self.sums:
            chosen = [s for s in self.sequences if s.domain == domain and (s.half == "even") == even]
            self._check((domain, even), sum(int(s.counted.sum()) for s in chosen))

    def _check(self, group: tuple[str, bool], tokens: int) -> None:
        check_conservation(self.layers, [self.sums[group][layer.name] for layer in self.layers], tokens)

    def _forward(self, batch: list[TokenSequence]) -> None:
        group = (batch[0].domain, batch[0].half == "even")
        if group not in self.sums:
            self.sums[group] = self._new_sums(*group)
        self._target, self._seen = self.sums[group], []
        ids, attention, counted = (tensor.to(self.model.device) for tensor in collate(batch))
        self._counted = None if bool(counted.all()) else counted.reshape(-1)
        self.model.base_model(input_ids=ids, attention_mask=attention, use_cache=False)  # no lm_head: logits are not needed
        if self._seen != [layer.name for layer in self.layers]:
            missing = sorted({layer.name for layer in self.layers} - set(self._seen)) or self._seen
            raise RecordingError(f"the forward pass did not call every MoE layer once, in order: {missing}")

    def _observe(self, layer: MoELayer, index: torch.Tensor, gates: torch.Tensor, outputs: torch.Tensor) -> None:
        sums = self._target[layer.name]
        sums.add(index, gates, outputs, self._counted)
        if not bool(torch.isfinite(sums.norm_square_sum).all()):
            raise RecordingError(f"{layer.name}: an expert's output is not finite in this batch; check the model and its dtype")
        self._seen.append(layer.name)

    def _new_sums(self, domain: str, even: bool) -> dict[str, LayerSums]:
        return {
            layer.name: LayerSums(
                layer.info, device=self.model.device, hidden=self.hidden, statistics=self.statistics
            )
            for layer in self.layers
        }

    def result(self, manifest: dict[str, Any]) -> RoutingStatistics:
        whole: dict[str, dict[str, LayerStatistics]] = {}
        half: dict[str, dict[str, LayerStatistics]] = {}
        for domain in manifest["domains"]:
            even, odd = (self.sums.get((domain, flag)) or self._new_sums(domain, flag) for flag in (True, False))
            half[domain] = {name: total.statistics() for name, total in even.items()}
            whole[domain] = {name: half[domain][name] + odd[name].statistics() for name in half[domain]}
        return RoutingStatistics(manifest, tuple(layer.info for layer in self.layers), whole, half)


def _digest(sequences: Sequence[TokenSequence]) -> str:
    digest = hashlib.sha256()
    for sequence in sequences:
        digest.update(sequence.domain.encode() + sequence.ids.tobytes() + sequence.counted.tobytes())
    return digest.hexdigest()
