"""Codes of fewer bits: integers, float8 e4m3 and NF4. Scales are exact in the dtype they are stored in."""

from dataclasses import dataclass

import torch

# Quantiles of a standard normal, scaled to [-1, 1] with an exact zero: appendix E of 2305.14314
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
SHRINKS = (0.95, 0.9, 0.85, 0.8)  # of the range, tried by a scale search
FP8_MAX = 448.0  # largest finite float8_e4m3fn


def storable(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Positive scales as the stored dtype holds them, float32; all-zero groups get 1."""
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return scale.to(dtype).clamp_(min=torch.finfo(dtype).tiny).float()


@dataclass(frozen=True)
class IntegerCodes:
    """Signed integer codes of `bits` bits, weight = (code - zero) * scale.

    Symmetric: scale = max|w| / (2^bits - 1) * 2, zero 0. Asymmetric: the range from min(w, 0) to max(w, 0), so that an
    exact 0 always has a code and a pruned weight stays pruned.
    """

    bits: int
    symmetric: bool = True
    group_size: int | None = None
    scale_dtype: torch.dtype = torch.float32
    search: bool = False  # also try clipping the largest weights, and keep what rounds with the least squared error

    @property
    def low(self) -> int:
        return -(2 ** (self.bits - 1))

    @property
    def high(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def fit(self, values: torch.Tensor, *, dim: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scale and zero for each slice along `dim`, with `dim` gone; zero is None when symmetric."""
        low, high = torch.aminmax(values, dim=dim)
        scale, zero = self._span(low, high)
        if not self.search:
            return scale, zero
        error = self._error(values, scale, zero, dim)
        for shrink in SHRINKS:
            tried, tried_zero = self._span(low * shrink, high * shrink)
            tried_error = self._error(values, tried, tried_zero, dim)
            better = tried_error < error
            error = torch.where(better, tried_error, error)
            scale = torch.where(better, tried, scale)
            if zero is not None and tried_zero is not None:
                zero = torch.where(better, tried_zero, zero)
        return scale, zero

    def _span(self, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scale and zero that reach from low to high."""
        levels = 2**self.bits - 1
        if self.symmetric:
            return storable(torch.maximum(-low, high) * (2 / levels), self.scale_dtype), None
        low, high = low.clamp(max=0), high.clamp(min=0)
        scale = storable((high - low) / levels, self.scale_dtype)
        return scale, (self.low - low / scale).round_().clamp_(self.low, self.high)

    def _error(self, values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, dim: int) -> torch.Tensor:
        rounded = self.round_into(values.clone(), scale.unsqueeze(dim), None if zero is None else zero.unsqueeze(dim))
        return rounded.sub_(values).square_().sum(dim)

    def round_into(self, values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
        """Round values in place to the nearest code, dequantised; scale and zero broadcast against them."""
        values.div_(scale)
        if zero is None:
            return values.round_().clamp_(self.low, self.high).mul_(scale)
        return values.add_(zero).round_().clamp_(self.low, self.high).sub_(zero).mul_(scale)


def float8_scale(values: torch.Tensor, *, dim: int | None, dtype: torch.dtype) -> torch.Tensor:
    """max|w| / 448 over `dim` (kept), or over everything as (1, 1)."""
    largest = values.abs().amax().view(1, 1) if dim is None else values.abs().amax(dim, keepdim=True)
    return storable(largest / FP8_MAX, dtype)


def round_float8(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Values rounded to float8 e4m3 times the scale, dequantised."""
    return (values / scale).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float().mul_(scale)


def round_nf4(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks (..., size) rounded to the nearest NF4 value times their largest magnitude; the magnitudes (..., 1)."""
    table = torch.tensor(NF4_VALUES, device=blocks.device)
    largest = blocks.abs().amax(-1, keepdim=True)
    scale = torch.where(largest > 0, largest, torch.ones_like(largest))
    middles = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize(blocks / scale, middles)
    return table[codes] * scale, scale
