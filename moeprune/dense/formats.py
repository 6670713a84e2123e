"""Float8 (e4m3) and NF4 (2305.14314): rounding to formats that engines know, no data needed."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from moeprune.dense.method import DenseMethod, Kind, Needs

if TYPE_CHECKING:
    import torch

    from moeprune.dense.result import DenseResult
    from moeprune.dense.statistics import InputStatistics


class FP8(DenseMethod):
    """float8 e4m3 with one scale a row (`channel`) or one in all (`tensor`): max|w| / 448."""

    name: Literal["fp8"] = "fp8"
    kind: ClassVar[Kind] = "quantise"
    needs: ClassVar[Needs] = "nothing"

    scale: Literal["channel", "tensor"] = "channel"

    def _compress(
        self,
        weight: "torch.Tensor",
        statistics: "InputStatistics",
        held: "torch.Tensor | None",
        scale_dtype: "torch.dtype",
    ) -> "DenseResult":
        from moeprune.dense.grids import float8_scale, round_float8
        from moeprune.dense.result import DenseResult, Grid, hold

        scale = float8_scale(weight, dim=1 if self.scale == "channel" else None, dtype=scale_dtype)
        return DenseResult(hold(round_float8(weight, scale), held), held, Grid("fp8", 8, None, True, scale))


class NF4(DenseMethod):
    """The nearest of 16 normal quantiles times the largest magnitude of each block of the flattened weight."""

    name: Literal["nf4"] = "nf4"
    kind: ClassVar[Kind] = "quantise"
    needs: ClassVar[Needs] = "nothing"

    block_size: int = Field(default=64, ge=2)

    def _compress(
        self,
        weight: "torch.Tensor",
        statistics: "InputStatistics",
        held: "torch.Tensor | None",
        scale_dtype: "torch.dtype",
    ) -> "DenseResult":
        from torch.nn.functional import pad

        from moeprune.dense.grids import round_nf4
        from moeprune.dense.result import DenseResult, Grid, hold

        flat = weight.flatten()
        blocks = pad(flat, (0, -flat.numel() % self.block_size)).view(-1, self.block_size)
        rounded, scale = round_nf4(blocks)
        rounded = rounded.flatten()[: flat.numel()].view_as(weight)
        return DenseResult(hold(rounded, held), held, Grid("nf4", 4, self.block_size, True, scale))
