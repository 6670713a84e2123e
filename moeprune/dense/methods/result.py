"""What a kernel returns, and the counts that are taken again after every step and after reload."""

from dataclasses import dataclass, field

import torch
from einops import reduce

from moeprune.artifacts.errors import InputError
from moeprune.dense.methods.kinds import Pattern


@dataclass(frozen=True)
class Quantised:
    """How a quantised weight is laid out: enough to pack it again without loss.

    Weight (out, in) = (code - zero) * scale, scale and zero repeated over groups of `group_size` columns (None: one
    group a row; fp8 per tensor: one scale in all).
    """

    scheme: str  # int, fp8 or nf4
    bits: int
    group_size: int | None
    symmetric: bool
    scale: torch.Tensor  # (out, groups), (1, 1) for one scale a tensor, (blocks, 1) for nf4; float32, exact as stored
    zero: torch.Tensor | None = None  # (out, groups), whole numbers in the signed code range; None when symmetric
    column_scale: torch.Tensor | None = None  # (in,) AWQ: the stored weight is this one times column_scale

    def bits_per_weight(self, shape: tuple[int, int], dtype: torch.dtype) -> float:
        """Stored bits a weight of shape (out, in): codes, scales in `dtype`, and zeros as wide as the codes."""
        parts = self.scale.numel() * torch.finfo(dtype).bits
        parts += 0 if self.zero is None else self.zero.numel() * self.bits
        return self.bits + parts / (shape[0] * shape[1])


@dataclass(frozen=True)
class DenseResult:
    """A compressed weight (out, in) in float32, and what happened on the way."""

    weight: torch.Tensor  # zeros where the mask says; quantised weights are given back dequantised
    mask: torch.Tensor | None = None  # (out, in) bool, True where a weight stays; None: nothing is pruned
    quantised: Quantised | None = None  # None: not quantised
    damping: float | None = None  # of the Hessian's mean diagonal, after any raise; None: no Hessian was used
    damping_steps: int = 0  # how often damping had to be raised
    dead_columns: int = 0  # inputs that were zero on all of the calibration data
    fallback: str | None = None  # the method that was used in place of the one asked for
    warnings: list[str] = field(default_factory=list)


def hold(weight: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The weight with exact zeros where the mask (out, in) is False; as it is without one."""
    return weight if mask is None else weight.masked_fill(~mask, 0)


def sparsity_of(weight: torch.Tensor) -> float:
    """The share of exact zeros, counted."""
    return 1.0 - int(torch.count_nonzero(weight)) / weight.numel()


def holds_mask(weight: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether every pruned place of the mask (out, in) is an exact zero of the weight."""
    return not bool(torch.any((weight != 0) & ~mask))


def follows(weight: torch.Tensor, pattern: Pattern) -> bool:
    """Whether every run of `pattern.group` columns of the weight (out, in) has at most `pattern.kept` non-zeros."""
    filled = reduce(weight != 0, "rows (groups size) -> rows groups", "sum", size=pattern.group)
    return bool((filled <= pattern.kept).all())


def check_finite(tensor: torch.Tensor, layer: str, what: str) -> None:
    """Raises InputError when the tensor holds NaN or infinity; one pass, no copy."""
    if tensor.numel() == 0:
        raise InputError(f"{layer}: {what} is empty")
    low, high = torch.aminmax(tensor)  # NaN propagates
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        raise InputError(
            f"{layer}: {what} holds NaN or infinity; nothing was compressed. Check the checkpoint and its dtype"
        )
