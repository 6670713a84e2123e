"""Does stock transformers read back exactly what was compressed? Names, numbers, zeros, then logits.

The checkpoint and the model that it should be are in memory side by side, or one layer of one of them at a time.
"""

import hashlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moeprune.artifacts.errors import InputError
from moeprune.dense.methods.kinds import Pattern
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


def require_reloads(directory: Path, model: Any, report: DenseReport, *, unused: Collection[str] = ()) -> Reloaded:
    """Load `directory` with stock transformers in its own dtype and compare it with the compressed model in memory.

    Every weight must be equal bit for bit after decompression, every pattern hold, no name be missing or unexpected
    (but for `unused`, names that transformers does not load from the source either).
    Raises ReloadError otherwise.
    """
    loaded, info = type(model).from_pretrained(directory, dtype="auto", output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        _require_none(directory, kind, (str(name) for name in info[kind]), unused)
    loaded.eval()
    _logits(loaded, loaded.device)  # packed weights are unpacked by the first forward
    comparison = _Comparison(directory, report)
    back = {weight.name: weight for weight in look(loaded).weights}
    for weight in look(model).weights:
        stored = weight.read().to(back[weight.name].dtype)
        comparison.add(weight.name, back[weight.name].read(), stored.float().cpu())
    loaded.to(model.dtype)
    rounded = _logits(loaded, loaded.device)
    with _inputs_not_rounded(loaded):
        plain = _logits(loaded, loaded.device)
    return comparison.result(_logits(model, model.device), plain, rounded, model.dtype)


def require_reloads_streamed(
    directory: Path,
    source: Path,
    compressed: Compressed,
    *,
    dtype: torch.dtype,
    scratch: Path,
    unused: Collection[str] = (),
) -> Reloaded:
    """`require_reloads` for a checkpoint that is larger than memory: one layer of it is in memory at a time.

    First `source` is read, with the results of the walk in place, then `directory` in transformers' own way. Logits are
    compared in `dtype`, that of the checkpoint. Raises ReloadError.
    """
    assert compressed.weights is not None, "only a streamed walk keeps its results beside the model"
    options = ModelOptions(dtype=str(dtype).removeprefix("torch."))
    ours = open_streamed(options.model_copy(update={"path": str(source)}), device="cpu")
    seen = look(ours.model).weights
    blocks = [[weight for weight in seen if weight.block == block] for block in range(len(ours.layers))]
    digests: dict[str, str] = {}
    with LayerMajor(ours, [partial(_logits, ours.model, ours.device)], scratch=scratch) as passes:
        for position in passes.layers():
            for weight in blocks[position]:
                if weight.name in compressed.weights:
                    weight.write(compressed.weights[weight.name])
            digests |= {weight.name: _digest(weight.read()) for weight in blocks[position]}
            passes.advance(0)
        logits = passes.finish(0)
    try:
        loaded = open_streamed(options.model_copy(update={"path": str(directory)}), device="cpu")
    except InputError as error:  # a name is missing
        raise ReloadError(str(error)) from error
    _require_none(directory, "unexpected_keys", loaded.unexpected, unused)
    comparison = _Comparison(directory, compressed.report)
    with LayerMajor(loaded, [partial(_logits, loaded.model, loaded.device)] * 2, scratch=scratch) as passes:
        for position in passes.layers():
            for weight in blocks[position]:
                comparison.add(weight.name, _in(loaded, weight).read(), digests[weight.name])
            passes.advance(0)
            with _inputs_not_rounded(loaded.model.get_submodule(loaded.layers[position])):
                passes.advance(1)
        return comparison.result(logits, passes.finish(1), passes.finish(0), dtype)


class _Comparison:
    """Weights as they load against what they should be, one after the other."""

    def __init__(self, directory: Path, report: DenseReport) -> None:
        self._directory = directory
        self._patterns = {step.weight: step.pattern for step in report.steps if step.pattern}
        self._compressed = {step.weight for step in report.steps}
        self._weights = self._zeros = self._elements = 0

    def add(self, name: str, read: torch.Tensor, expected: torch.Tensor | str) -> None:
        """Raises ReloadError unless a weight (out, in) float32 is what is expected: such a weight, or its digest."""
        if isinstance(expected, str):
            apart = "" if _digest(read) == expected else "differs"
        else:
            apart = "" if torch.equal(read, expected) else f"differs by {float((read - expected).abs().max()):.1e}"
        if apart:
            raise ReloadError(f"{self._directory}: {name} {apart} after reload")
        pattern = self._patterns.get(name)
        if pattern is not None and not follows(read, Pattern.parse(pattern)):
            raise ReloadError(f"{self._directory}: {name} does not follow {pattern} after reload")
        self._weights += 1
        if name in self._compressed:
            self._zeros += read.numel() - int(torch.count_nonzero(read))
            self._elements += read.numel()

    def result(self, ours: torch.Tensor, plain: torch.Tensor, rounded: torch.Tensor, dtype: torch.dtype) -> Reloaded:
        """Raises ReloadError when logits of equal weights, computed in `dtype`, lie too far apart."""
        distance = relative_distance(ours, plain)
        if not distance < (1e-4 if dtype == torch.float32 else 5e-2):
            raise ReloadError(
                f"{self._directory}: logits differ by {distance:.1e} after reload though the weights are equal"
            )
        sparsity = self._zeros / self._elements if self._elements else 0.0
        return Reloaded(self._weights, distance, relative_distance(ours, rounded), sparsity)


def relative_distance(ours: torch.Tensor, other: torch.Tensor) -> float:
    """||difference|| / ||ours||."""
    return float((ours.float() - other.float()).norm() / ours.float().norm())


def _require_none(directory: Path, kind: str, names: Iterable[str], unused: Collection[str]) -> None:
    wrong = sorted(name for name in names if name not in unused)
    if wrong:
        raise ReloadError(f"{directory}: {len(wrong)} {kind.replace('_', ' ')} on reload, first {wrong[0]}")


def _logits(model: Any, device: torch.device) -> torch.Tensor:
    """Logits (1, length, vocabulary), on the CPU, of a few tokens."""
    ids = torch.arange(10, 26)[None] % model.config.get_text_config().vocab_size
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids.to(device), use_cache=False).logits
    return logits.cpu()


def _in(loaded: StreamedModel, weight: Weight) -> Weight:
    """The same weight of another model; a packed one is no parameter there before its layer is in memory."""
    return replace(weight, module=loaded.model.get_submodule(parameter_of(weight).rpartition(".")[0]))


def _digest(weight: torch.Tensor) -> str:
    """Of a float32 weight (out, in); equal numbers give equal digests, so -0 becomes 0 in it."""
    return hashlib.sha256(weight.add_(0.0).view(torch.uint8).numpy().data).hexdigest()


@contextmanager
def _inputs_not_rounded(module: nn.Module) -> Iterator[None]:
    """Inside, float8 layers take their inputs as they are, like those of the model that was not packed."""
    quantised: list[Any] = [part for part in module.modules() if hasattr(part, "quantization_scheme")]
    for part in quantised:
        part.quantization_enabled = False
    try:
        yield
    finally:
        for part in quantised:
            part.quantization_enabled = True
