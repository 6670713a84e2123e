"""AWQ (2306.00978): scale the inputs that are large before rounding, so that their weights round more finely."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from moeprune.dense.method import Needs
from moeprune.dense.quantize import Integers

if TYPE_CHECKING:
    import torch

    from moeprune.dense.result import DenseResult
    from moeprune.dense.statistics import InputStatistics

SEARCH_ROWS = 512  # outputs that the search measures on: one scale serves all rows, an even sample of them decides


class AWQ(Integers):
    """W' = round(W diag(s)) diag(s)^-1 with s = mean|x|^a, a searched on a grid by the output error.

    a = 0 is plain rounding, so the result is never worse than rtn on the rows measured. Stored integers need s folded
    into the layer before; without that fold the result is for evaluation in memory.
    """

    name: Literal["awq"] = "awq"
    needs: ClassVar[Needs] = "hessian"

    scale: Literal["mse", "max"] = "max"
    search_steps: int = Field(default=20, ge=1)

    def _compress(
        self,
        weight: "torch.Tensor",
        statistics: "InputStatistics",
        held: "torch.Tensor | None",
        scale_dtype: "torch.dtype",
    ) -> "DenseResult":
        from dataclasses import replace

        from moeprune.dense.result import hold

        sample = weight[:: max(1, -(-weight.shape[0] // SEARCH_ROWS))].contiguous()
        best, best_error = None, float("inf")
        for step in range(self.search_steps):
            columns = self._columns(statistics, step / self.search_steps)
            change = self._rounded(sample, statistics, columns, scale_dtype).weight - sample
            error = statistics.output_energy(change)
            if error < best_error:
                best, best_error = columns, error
        assert best is not None
        result = self._rounded(weight, statistics, best, scale_dtype)
        assert result.grid is not None
        grid = replace(result.grid, column_scale=best)
        return replace(result, weight=hold(result.weight, held), mask=held, grid=grid)

    @staticmethod
    def _columns(statistics: "InputStatistics", exponent: float) -> "torch.Tensor":
        """s (in,): mean|x|^exponent, over the geometric mean of its extremes; silent inputs count as tiny ones."""
        scale = statistics.mean_absolute().pow(exponent).clamp(min=1e-4)
        return scale / (scale.max() * scale.min()).sqrt()

    def _rounded(
        self, weight: "torch.Tensor", statistics: "InputStatistics", columns: "torch.Tensor", dtype: "torch.dtype"
    ) -> "DenseResult":
        from dataclasses import replace

        rounded = self._weights_only()._compress(weight * columns, statistics, None, dtype)
        return replace(rounded, weight=rounded.weight / columns)
