"""`require_reloads` for a checkpoint that is larger than memory: it and its source are read layer by layer, in turn.

Does stock transformers read back exactly what was compressed? Names, numbers, zeros, then logits.
"""

import hashlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moeprune.artifacts.errors import InputError
from moeprune.dense.methods.patterns import Pattern
from moeprune.dense.methods.result import follows
from moeprune.dense.places import parameter_of
from moeprune.dense.report import DenseReport
from moeprune.dense.walk import Compressed
from moeprune.dense.weights import Weight, look
from moeprune.models.options import ModelOptions
from moeprune.models.streaming.model import StreamedModel, open_streamed
from moeprune.models.streaming.passes import LayerMajor


class ReloadError(RuntimeError):
    """The written checkpoint does not load as what it should be."""


@dataclass(frozen=True)
class Reloaded:
    """What was compared and found equal."""

    weights: int
    logits_distance: float  # ||difference|| / ||logits||, in the dtype of the model in memory
    rounded_distance: float  # the same as engines run it, where float8 layers also round what comes in
    sparsity: float  # of the weights that were compressed, counted after reload


def require_reloads(
    directory: Path,
    model: Any,
    report: DenseReport,
    *,
    input_ids: torch.Tensor | None = None,
    unused: Collection[str] = (),
) -> Reloaded:
    """Load `directory` with stock transformers in its own dtype and compare it with the compressed model in memory.

    Every weight must be equal bit for bit after decompression, every pattern hold, no name be missing or unexpected
    (but for `unused`, names that transformers does not load from the source either).
    Raises ReloadError otherwise. input_ids (batch, length) int64: what the logits are compared on.
    """
    loaded = _load(directory, type(model), unused)
    ids = input_ids if input_ids is not None else torch.arange(10, 26)[None] % model.config.get_text_config().vocab_size
    with torch.no_grad():
        loaded(input_ids=ids, use_cache=False)  # packed weights are unpacked by the first forward
    weights, sparsity = _require_equal(directory, loaded, model, report)
    loaded = loaded.to(model.dtype)
    rounded = _distance(loaded, model, ids)
    for module in loaded.modules():
        if hasattr(module, "quantization_scheme"):  # its inputs were rounded too; those of the model in memory are not
            module.quantization_enabled = False
    distance = _distance(loaded, model, ids)
    if not distance < tolerance(model.dtype):
        raise ReloadError(f"{directory}: logits differ by {distance:.1e} after reload though the weights are equal")
    return Reloaded(weights, distance, rounded, sparsity)


def _require_equal(directory: Path, loaded: Any, model: Any, report: DenseReport) -> tuple[int, float]:
    """(weights compared, share of zeros in those that were compressed)."""
    patterns = {stage.weight: stage.pattern for stage in report.stages if stage.pattern}
    compressed = {stage.weight for stage in report.stages}
    zeros = elements = 0
    back = {weight.name: weight for weight in look(loaded).weights}
    for weight in look(model).weights:
        read = back[weight.name].read()
        expected = weight.read().to(back[weight.name].dtype).float().cpu()
        if not torch.equal(read, expected):
            apart = float((read - expected).abs().max())
            raise ReloadError(f"{directory}: {weight.name} differs by {apart:.1e} after reload")
        pattern = patterns.get(weight.name)
        if pattern is not None and not follows(read, Pattern.parse(pattern)):
            raise ReloadError(f"{directory}: {weight.name} does not follow {pattern} after reload")
        if weight.name in compressed:
            zeros += read.numel() - int(torch.count_nonzero(read))
            elements += read.numel()
    return len(back), zeros / elements if elements else 0.0


def _distance(loaded: Any, model: Any, ids: torch.Tensor) -> float:
    """||logits - logits after reload|| / ||logits||, both in the dtype of the model in memory."""
    with torch.no_grad():
        theirs = loaded(input_ids=ids, use_cache=False).logits.float()
        ours = model(input_ids=ids.to(model.device), use_cache=False).logits.float().cpu()
    return relative_distance(ours, theirs)


def relative_distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """||difference|| / ||ours||."""
    return float((ours.float() - theirs.float()).norm() / ours.float().norm())


def tolerance(dtype: torch.dtype) -> float:
    """How far logits of equal weights may lie apart."""
    return 1e-4 if dtype == torch.float32 else 5e-2


def _load(directory: Path, model_class: Any, unused: Collection[str]) -> Any:
    loaded, info = model_class.from_pretrained(directory, dtype="auto", output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(str(name) for name in info[kind] if name not in unused)
        if names:
            raise ReloadError(f"{directory}: {len(names)} {kind.replace('_', ' ')} on reload, first {names[0]}")
    return loaded.eval()


def require_reloads_streamed(
    directory: Path,
    source: Path,
    compressed: Compressed,
    *,
    dtype: torch.dtype,
    scratch: Path,
    input_ids: torch.Tensor | None = None,
    unused: Collection[str] = (),
) -> Reloaded:
    """Read `source`, with the results of the walk in place, and then `directory` in transformers' own way; compare.

    As in `require_reloads` every weight must be equal bit for bit, every pattern hold and no name be missing or
    unexpected. Logits are compared in `dtype`, that of the checkpoint; one layer is in memory at a time.
    Raises ReloadError.
    """
    assert compressed.weights is not None, "only a streamed walk keeps its results beside the model"
    options = ModelOptions(dtype=str(dtype).removeprefix("torch."))
    ours = open_streamed(options.model_copy(update={"path": str(source)}), device="cpu")
    size = ours.model.config.get_text_config().vocab_size
    ids = input_ids if input_ids is not None else torch.arange(10, 26)[None] % size
    seen = look(ours.model).weights
    blocks = [[weight for weight in seen if weight.block == block] for block in range(len(ours.layers))]
    expected, logits = _expected(ours, blocks, compressed, ids, scratch)
    try:
        theirs = open_streamed(options.model_copy(update={"path": str(directory)}), device="cpu")
    except InputError as error:  # a name is missing
        raise ReloadError(str(error)) from error
    unknown = sorted(theirs.unexpected - set(unused))
    if unknown:
        raise ReloadError(f"{directory}: {len(unknown)} unexpected keys on reload, first {unknown[0]}")
    back = _Back(directory, theirs, blocks, compressed, expected)
    rounded, plain = back.logits(ids, scratch)
    distance = relative_distance(logits, plain)
    if not distance < tolerance(dtype):
        raise ReloadError(f"{directory}: logits differ by {distance:.1e} after reload though the weights are equal")
    return Reloaded(len(expected), distance, relative_distance(logits, rounded), back.sparsity)


def _expected(
    ours: StreamedModel, blocks: Sequence[Sequence[Weight]], compressed: Compressed, ids: torch.Tensor, scratch: Path
) -> tuple[dict[str, str], torch.Tensor]:
    """Weight -> digest of its numbers after the walk; and the logits they give."""
    assert compressed.weights is not None
    digests: dict[str, str] = {}
    with LayerMajor(ours, [partial(_forward, ours, ids)], scratch=scratch) as passes:
        for position in passes.layers():
            for weight in blocks[position]:
                if weight.name in compressed.weights:
                    weight.write(compressed.weights[weight.name])
            digests |= {weight.name: _digest(weight.read()) for weight in blocks[position]}
            passes.advance(0)
        return digests, passes.finish(0)


class _Back:
    """The written checkpoint as it loads, compared layer by layer while a pass goes through it."""

    def __init__(
        self,
        directory: Path,
        theirs: StreamedModel,
        blocks: Sequence[Sequence[Weight]],
        compressed: Compressed,
        expected: dict[str, str],
    ) -> None:
        self._directory, self._theirs, self._expected = directory, theirs, expected
        model = theirs.model
        self._blocks = [
            [replace(w, module=model.get_submodule(parameter_of(w).rpartition(".")[0])) for w in weights]
            for weights in blocks
        ]
        stages = compressed.report.stages
        self._patterns = {stage.weight: stage.pattern for stage in stages if stage.pattern}
        self._compressed = {stage.weight for stage in stages}
        self._zeros = self._elements = 0

    @property
    def sparsity(self) -> float:
        """Share of exact zeros among the weights that were compressed."""
        return self._zeros / self._elements if self._elements else 0.0

    def logits(self, ids: torch.Tensor, scratch: Path) -> tuple[torch.Tensor, torch.Tensor]:
        """(as engines run it, where float8 layers round what comes in; without that rounding)."""
        theirs = self._theirs
        forwards = [partial(_forward, theirs, ids), partial(_forward, theirs, ids)]
        with LayerMajor(theirs, forwards, scratch=scratch) as passes:
            for position in passes.layers():
                layer = theirs.model.get_submodule(theirs.layers[position])
                self._require_equal(position)
                passes.advance(0)
                with _inputs_not_rounded(layer):
                    passes.advance(1)
            return passes.finish(0), passes.finish(1)

    def _require_equal(self, position: int) -> None:
        for weight in self._blocks[position]:
            read = weight.read()
            if _digest(read) != self._expected[weight.name]:
                raise ReloadError(f"{self._directory}: {weight.name} differs after reload")
            pattern = self._patterns.get(weight.name)
            if pattern is not None and not follows(read, Pattern.parse(pattern)):
                raise ReloadError(f"{self._directory}: {weight.name} does not follow {pattern} after reload")
            if weight.name in self._compressed:
                self._zeros += read.numel() - int(torch.count_nonzero(read))
                self._elements += read.numel()


def _forward(streamed: StreamedModel, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = streamed.model(input_ids=ids.clone(), use_cache=False).logits
    return logits


def _digest(weight: torch.Tensor) -> str:
    """Of a float32 copy (out, in), which this changes; equal numbers give equal digests, so -0 becomes 0."""
    return hashlib.sha256(weight.add_(0.0).view(torch.uint8).numpy().data).hexdigest()


@contextmanager
def _inputs_not_rounded(layer: Any) -> Iterator[None]:
    quantised = [module for module in layer.modules() if hasattr(module, "quantization_scheme")]
    for module in quantised:
        module.quantization_enabled = False
    try:
        yield
    finally:
        for module in quantised:
            module.quantization_enabled = True
