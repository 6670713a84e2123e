"""Methods that store fewer bits a weight: integers, float8 (e4m3) and NF4 (2305.14314).

Integers are rounded to nearest, along the sweep (GPTQ, 2210.17323), in one sweep with pruning (joint), or after scaling
the inputs that are large, so that their weights round more finely (AWQ, 2306.00978).

HWPQ (2501.16376) is not here: only its abstract and its reviews could be read, and the score as reviewed shrinks where
inputs are large, the opposite of every other score; what would carry its name would be a guess. Its parts, float8 and
2:4, are offered under their own names.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from moeprune.artifacts.errors import InputError
from moeprune.dense.methods.kinds import Kind, Needs
from moeprune.dense.methods.method import DenseMethod
from moeprune.dense.methods.pruning import HessianPruning

if TYPE_CHECKING:
    import torch

    from moeprune.dense.methods.codes import IntegerCodes
    from moeprune.dense.methods.inputs import Conditions, InputStatistics
    from moeprune.dense.methods.result import DenseResult

SEARCH_ROWS = 512  # outputs that AWQ's search measures on: one scale serves all rows, an even sample of them decides


def check_group(layer: str, in_features: int, group_size: int | None, field: str = "group_size") -> None:
    """Raises InputError when the group size does not divide the inputs, naming sizes that do."""
    if group_size is not None and in_features % group_size:
        fits = [size for size in (128, 64, 32, 16, 8) if in_features % size == 0]
        raise InputError(
            f"{layer}: {field} {group_size} does not divide its {in_features} inputs; "
            f"use {' or '.join(map(str, fits)) or 'null'}{', or null for one scale a row' if fits else ''}"
        )


def integer_codes(options: "Integers | Joint", scale_dtype: "torch.dtype") -> "IntegerCodes":
    """The codes that the options ask for."""
    from moeprune.dense.methods.codes import IntegerCodes

    return IntegerCodes(options.bits, options.symmetric, options.group_size, scale_dtype, options.scale == "mse")


def nearest(options: "Integers | Joint") -> "RTN":
    """Plain rounding to the same codes."""
    return RTN(bits=options.bits, group_size=options.group_size, symmetric=options.symmetric, scale=options.scale)


class Integers(DenseMethod):
    """Integer codes of `bits` bits with one scale for each `group_size` inputs of a row."""

    kind: ClassVar[Kind] = "quantise"

    bits: int = Field(default=4, ge=2, le=8)
    group_size: int | None = Field(default=128, ge=2)  # null: one scale a row
    symmetric: bool = True
    scale: Literal["mse", "max"] = "mse"  # mse: clip a group's largest weights where that lowers its squared error

    def check_shape(self, layer: str, in_features: int) -> None:
        check_group(layer, in_features, self.group_size)

    def _weights_only(self) -> DenseMethod:
        return nearest(self)


class RTN(Integers):
    """Every weight to the nearest code; needs no data."""

    name: Literal["rtn"] = "rtn"
    needs: ClassVar[Needs] = "nothing"

    scale: Literal["mse", "max"] = "max"

    def _compress(self, weight: "torch.Tensor", given: "Conditions") -> "DenseResult":
        from einops import rearrange

        from moeprune.dense.methods.result import DenseResult, Quantised, hold

        codes, size = integer_codes(self, given.scale_dtype), self.group_size or weight.shape[1]
        groups = rearrange(weight, "rows (groups size) -> rows groups size", size=size).clone()
        scale, zero = codes.fit(groups, dim=2)
        codes.round_into(groups, scale[..., None], None if zero is None else zero[..., None])
        rounded = rearrange(groups, "rows groups size -> rows (groups size)")
        layout = Quantised("int", self.bits, self.group_size, self.symmetric, scale, zero)
        return DenseResult(hold(rounded, given.held), given.held, layout)


class GPTQ(Integers):
    """Rounding along the sweep. `activation_order` auto: on, except where a mask is held (it measured worse there)."""

    name: Literal["gptq"] = "gptq"
    needs: ClassVar[Needs] = "hessian"

    damping: float = Field(default=0.01, gt=0, le=1)  # of the Hessian's mean diagonal
    activation_order: Literal["auto", "static", "off"] = "auto"

    def _compress(self, weight: "torch.Tensor", given: "Conditions") -> "DenseResult":
        from moeprune.dense.methods.sweep import swept_result

        ordered = self.activation_order == "static" or (self.activation_order == "auto" and given.held is None)
        codes = integer_codes(self, given.scale_dtype)
        return swept_result(
            weight, given.statistics, self.damping, codes=codes, held=given.held, activation_order=ordered
        )


class Joint(HessianPruning):
    """SparseGPT's choice and GPTQ's rounding in one sweep, so that each answers the other's error (2301.00774)."""

    name: Literal["joint"] = "joint"
    kind: ClassVar[Kind] = "joint"
    by_row: ClassVar[bool] = False

    bits: int = Field(default=4, ge=2, le=8)
    group_size: int | None = Field(default=128, ge=2)  # null: one scale a row
    symmetric: bool = True
    scale: Literal["mse", "max"] = "mse"
    damping: float = Field(default=0.01, gt=0, le=1)

    def check_shape(self, layer: str, in_features: int) -> None:
        super().check_shape(layer, in_features)
        check_group(layer, in_features, self.group_size)

    def _compress(self, weight: "torch.Tensor", given: "Conditions") -> "DenseResult":
        from moeprune.dense.methods.sweep import swept_result

        codes = integer_codes(self, given.scale_dtype)
        return swept_result(weight, given.statistics, self.damping, choice=self._choice(), codes=codes, held=given.held)

    def _fall_back(
        self, method: DenseMethod, reason: str, weight: "torch.Tensor", given: "Conditions"
    ) -> "DenseResult":
        """The fallback prunes; what stays is rounded to the nearest code, so that the layout is the one asked for."""
        pruned = super()._fall_back(method, reason, weight, given)
        rounded = nearest(self)._compress(pruned.weight, replace(given, held=pruned.mask))
        fallback = f"{pruned.fallback} then rtn"
        return replace(pruned, weight=rounded.weight, quantised=rounded.quantised, fallback=fallback)


class FP8(DenseMethod):
    """float8 e4m3 with one scale a row (`channel`) or one in all (`tensor`): max|w| / 448."""

    name: Literal["fp8"] = "fp8"
    kind: ClassVar[Kind] = "quantise"
    needs: ClassVar[Needs] = "nothing"

    scale: Literal["channel", "tensor"] = "channel"

    def _compress(self, weight: "torch.Tensor", given: "Conditions") -> "DenseResult":
        from moeprune.dense.methods.codes import float8_scale, round_float8
        from moeprune.dense.methods.result import DenseResult, Quantised, hold

        scale = float8_scale(weight, dim=1 if self.scale == "channel" else None, dtype=given.scale_dtype)
        return DenseResult(
            hold(round_float8(weight, scale), given.held), given.held, Quantised("fp8", 8, None, True, scale)
        )


class NF4(DenseMethod):
    """The nearest of 16 normal quantiles times the largest magnitude of each block of the flattened weight."""

    name: Literal["nf4"] = "nf4"
    kind: ClassVar[Kind] = "quantise"
    needs: ClassVar[Needs] = "nothing"

    block_size: int = Field(default=64, ge=2)

    def _compress(self, weight: "torch.Tensor", given: "Conditions") -> "DenseResult":
        from torch.nn.functional import pad

        from moeprune.dense.methods.codes import round_nf4
        from moeprune.dense.methods.result import DenseResult, Quantised, hold

        flat = weight.flatten()
        blocks = pad(flat, (0, -flat.numel() % self.block_size)).view(-1, self.block_size)
        rounded, scale = round_nf4(blocks)
        rounded = rounded.flatten()[: flat.numel()].view_as(weight)
        return DenseResult(hold(rounded, given.held), given.held, Quantised("nf4", 4, self.block_size, True, scale))


class AWQ(Integers):
    """W' = round(W diag(s)) diag(s)^-1 with s = mean|x|^a, a searched in equal steps by the output error.

    a = 0 is plain rounding, so the result is never worse than rtn on the rows measured. Stored integers need s folded
    into the layer before; without that fold the result is for evaluation in memory.
    """

    name: Literal["awq"] = "awq"
    needs: ClassVar[Needs] = "hessian"

    scale: Literal["mse", "max"] = "max"
    search_steps: int = Field(default=20, ge=1)

    def _compress(self, weight: "torch.Tensor", given: "Conditions") -> "DenseResult":
        from moeprune.dense.methods.result import hold

        statistics = given.statistics
        sample = weight[:: max(1, -(-weight.shape[0] // SEARCH_ROWS))].contiguous()
        best, best_error = None, float("inf")
        for step in range(self.search_steps):
            columns = self._columns(statistics, step / self.search_steps)
            error = statistics.output_energy(self._rounded(sample, given, columns).weight - sample)
            if error < best_error:
                best, best_error = columns, error
        assert best is not None
        result = self._rounded(weight, given, best)
        assert result.quantised is not None
        quantised = replace(result.quantised, column_scale=best)
        return replace(result, weight=hold(result.weight, given.held), mask=given.held, quantised=quantised)

    @staticmethod
    def _columns(statistics: "InputStatistics", exponent: float) -> "torch.Tensor":
        """s (in,): mean|x|^exponent, over the geometric mean of its extremes; silent inputs count as tiny ones."""
        scale = statistics.mean_absolute().pow(exponent).clamp(min=1e-4)
        return scale / (scale.max() * scale.min()).sqrt()

    def _rounded(self, weight: "torch.Tensor", given: "Conditions", columns: "torch.Tensor") -> "DenseResult":
        rounded = self._weights_only()._compress(weight * columns, replace(given, held=None))
        return replace(rounded, weight=rounded.weight / columns)
