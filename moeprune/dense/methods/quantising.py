"""Fewer bits as integers: rounding to nearest, GPTQ (2210.17323), and the sweep that prunes and quantises in one pass.

HWPQ (2501.16376) is not here: only its abstract and its reviews could be read, and the score as reviewed shrinks where
inputs are large, the opposite of every other score; what would carry its name would be a guess. Its parts, float8 and
2:4, are offered under their own names.
"""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from moeprune.dense.magnitude import Magnitude
from moeprune.dense.method import DenseMethod, Kind, Needs, Pruning
from moeprune.dense.sparsegpt import sparsegpt_choice
from moeprune.dense.wanda import Wanda

if TYPE_CHECKING:
    import torch

    from moeprune.dense.grids import IntegerGrid
    from moeprune.dense.result import DenseResult
    from moeprune.dense.statistics import InputStatistics


def check_group(layer: str, in_features: int, group_size: int | None, field: str = "group_size") -> None:
    """Raises InputError when the group size does not divide the inputs, naming sizes that do."""
    from moeprune.artifacts.errors import InputError

    if group_size is not None and in_features % group_size:
        fits = [size for size in (128, 64, 32, 16, 8) if in_features % size == 0]
        raise InputError(
            f"{layer}: {field} {group_size} does not divide its {in_features} inputs; "
            f"use {' or '.join(map(str, fits)) or 'null'}{', or null for one scale a row' if fits else ''}"
        )


class Integers(DenseMethod):
    """Integer codes of `bits` bits with one scale for each `group_size` inputs of a row."""

    kind: ClassVar[Kind] = "quantise"

    bits: int = Field(default=4, ge=2, le=8)
    group_size: int | None = Field(default=128, ge=2)  # null: one scale a row
    symmetric: bool = True
    scale: Literal["mse", "max"] = "mse"  # mse: clip a group's largest weights where that lowers its squared error

    def _grid(self, scale_dtype: "torch.dtype") -> "IntegerGrid":
        from moeprune.dense.grids import IntegerGrid

        return IntegerGrid(self.bits, self.symmetric, self.group_size, scale_dtype, self.scale == "mse")

    def check_shape(self, layer: str, in_features: int) -> None:
        check_group(layer, in_features, self.group_size)

    def _weights_only(self) -> DenseMethod:
        return RTN(bits=self.bits, group_size=self.group_size, symmetric=self.symmetric, scale=self.scale)


class RTN(Integers):
    """Every weight to the nearest code; needs no data."""

    name: Literal["rtn"] = "rtn"
    needs: ClassVar[Needs] = "nothing"

    scale: Literal["mse", "max"] = "max"

    def _compress(
        self,
        weight: "torch.Tensor",
        statistics: "InputStatistics",
        held: "torch.Tensor | None",
        scale_dtype: "torch.dtype",
    ) -> "DenseResult":
        from moeprune.dense.result import DenseResult, Grid, hold

        grid = self._grid(scale_dtype)
        groups = weight.unflatten(1, (-1, self.group_size or weight.shape[1])).clone()
        scale, zero = grid.fit(groups, dim=2)
        rounded = grid.round_into(groups, scale[..., None], None if zero is None else zero[..., None]).flatten(1)
        layout = Grid("int", self.bits, self.group_size, self.symmetric, scale, zero)
        return DenseResult(hold(rounded, held), held, layout)


class GPTQ(Integers):
    """Rounding along the sweep. `activation_order` auto: on, except where a mask is held (it measured worse there)."""

    name: Literal["gptq"] = "gptq"
    needs: ClassVar[Needs] = "hessian"

    damping: float = Field(default=0.01, gt=0, le=1)  # of the Hessian's mean diagonal
    activation_order: Literal["auto", "static", "off"] = "auto"

    def _compress(
        self,
        weight: "torch.Tensor",
        statistics: "InputStatistics",
        held: "torch.Tensor | None",
        scale_dtype: "torch.dtype",
    ) -> "DenseResult":
        from moeprune.dense.obs import swept_result

        ordered = self.activation_order == "static" or (self.activation_order == "auto" and held is None)
        grid = self._grid(scale_dtype)
        return swept_result(weight, statistics, self.damping, grid=grid, held=held, activation_order=ordered)


class Joint(Pruning):
    """SparseGPT's choice and GPTQ's rounding in one sweep, so that each answers the other's error (2301.00774)."""

    name: Literal["joint"] = "joint"
    kind: ClassVar[Kind] = "joint"
    by_row: ClassVar[bool] = False
    needs: ClassVar[Needs] = "hessian"

    bits: int = Field(default=4, ge=2, le=8)
    group_size: int | None = Field(default=128, ge=2)  # null: one scale a row
    symmetric: bool = True
    scale: Literal["mse", "max"] = "mse"
    damping: float = Field(default=0.01, gt=0, le=1)

    def check_shape(self, layer: str, in_features: int) -> None:
        super().check_shape(layer, in_features)
        check_group(layer, in_features, self.group_size)

    def _compress(
        self,
        weight: "torch.Tensor",
        statistics: "InputStatistics",
        held: "torch.Tensor | None",
        scale_dtype: "torch.dtype",
    ) -> "DenseResult":
        from moeprune.dense.grids import IntegerGrid
        from moeprune.dense.obs import swept_result

        grid = IntegerGrid(self.bits, self.symmetric, self.group_size, scale_dtype, self.scale == "mse")
        return swept_result(weight, statistics, self.damping, choice=sparsegpt_choice(self), grid=grid, held=held)

    def _weights_only(self) -> DenseMethod:
        return Magnitude(sparsity=self.sparsity, pattern=self.pattern)

    def _without_hessian(self) -> DenseMethod:
        return Wanda(sparsity=self.sparsity, pattern=self.pattern)

    def _fall_back(
        self,
        method: DenseMethod,
        reason: str,
        weight: "torch.Tensor",
        statistics: "InputStatistics",
        held: "torch.Tensor | None",
        scale_dtype: "torch.dtype",
    ) -> "DenseResult":
        """The fallback prunes; what stays is rounded to the nearest code, so that the layout is the one asked for."""
        from dataclasses import replace

        pruned = super()._fall_back(method, reason, weight, statistics, held, scale_dtype)
        rounding = RTN(bits=self.bits, group_size=self.group_size, symmetric=self.symmetric, scale=self.scale)
        rounded = rounding._compress(pruned.weight, statistics, pruned.mask, scale_dtype)
        return replace(pruned, weight=rounded.weight, grid=rounded.grid, fallback=f"{pruned.fallback} then rtn")
