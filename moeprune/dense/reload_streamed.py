"""`require_reloads` for a checkpoint that is larger than memory: it and its source are read layer by layer, in turn."""

import hashlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moeprune.artifacts.errors import InputError
from moeprune.dense.patterns import Pattern
from moeprune.dense.places import parameter_of
from moeprune.dense.reload import Reloaded, ReloadError, relative_distance, tolerance
from moeprune.dense.result import follows
from moeprune.dense.walk import Compressed
from moeprune.dense.weights import Weight, look
from moeprune.models.layer_major import LayerMajor
from moeprune.models.loading import ModelOptions
from moeprune.models.streaming import StreamedModel, open_streamed


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
