"""Prune by |w|: the baseline. It needs no data and loses badly on language models at 2:4 (METHODS in the README)."""

from typing import TYPE_CHECKING, ClassVar, Literal

from moeprune.dense.method import Needs, Pruning

if TYPE_CHECKING:
    import torch

    from moeprune.dense.result import DenseResult
    from moeprune.dense.statistics import InputStatistics


class Magnitude(Pruning):
    """The smallest |w| of each output row, or of each group of M, go."""

    name: Literal["magnitude"] = "magnitude"
    needs: ClassVar[Needs] = "nothing"

    def _compress(
        self,
        weight: "torch.Tensor",
        statistics: "InputStatistics",
        held: "torch.Tensor | None",
        scale_dtype: "torch.dtype",
    ) -> "DenseResult":
        from moeprune.dense.result import DenseResult

        drops = self._drops(weight.abs(), held)
        return DenseResult(weight.masked_fill(drops, 0), drops.logical_not_())
