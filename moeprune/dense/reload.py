"""Does stock transformers read back exactly what was compressed? Names, numbers, zeros, then logits."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moeprune.dense.patterns import Pattern
from moeprune.dense.report import DenseReport
from moeprune.dense.result import follows
from moeprune.dense.weights import look


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
