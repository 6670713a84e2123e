"""Wanda (2306.11695): prune by |w_ij| x ||X_j||_2, compared inside each output row or each group of M inputs."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from moeprune.dense.magnitude import Magnitude
from moeprune.dense.method import DenseMethod, Needs, Pruning

if TYPE_CHECKING:
    import torch

    from moeprune.dense.result import DenseResult
    from moeprune.dense.statistics import InputStatistics


def wanda_scores(weight: "torch.Tensor", statistics: "InputStatistics") -> "torch.Tensor":
    """|w_ij| x ||X_j||_2, (out, in)."""
    return (weight * statistics.norms()).abs_()


class Wanda(Pruning):
    """The mask alone; surviving weights are not changed."""

    name: Literal["wanda"] = "wanda"
    needs: ClassVar[Needs] = "norms"

    def _compress(
        self,
        weight: "torch.Tensor",
        statistics: "InputStatistics",
        held: "torch.Tensor | None",
        scale_dtype: "torch.dtype",
    ) -> "DenseResult":
        from moeprune.dense.result import DenseResult

        drops = self._drops(wanda_scores(weight, statistics), held)
        dead = int((statistics.square_sum == 0).sum())
        return DenseResult(weight.masked_fill(drops, 0), drops.logical_not_(), dead_columns=dead)

    def _weights_only(self) -> DenseMethod:
        return Magnitude(sparsity=self.sparsity, pattern=self.pattern)


class WandaUpdate(Pruning):
    """Wanda's mask, then the surviving weights answer what went (the update of 2301.00774)."""

    name: Literal["wanda_update"] = "wanda_update"
    needs: ClassVar[Needs] = "hessian"

    damping: float = Field(default=0.01, gt=0, le=1)  # of the Hessian's mean diagonal

    def _compress(
        self,
        weight: "torch.Tensor",
        statistics: "InputStatistics",
        held: "torch.Tensor | None",
        scale_dtype: "torch.dtype",
    ) -> "DenseResult":
        from moeprune.dense.choice import Fixed
        from moeprune.dense.obs import swept_result

        drops = self._drops(wanda_scores(weight, statistics), held)
        return swept_result(weight, statistics, self.damping, choice=Fixed(drops.logical_not_()))

    def _weights_only(self) -> DenseMethod:
        return Magnitude(sparsity=self.sparsity, pattern=self.pattern)

    def _without_hessian(self) -> DenseMethod:
        return Wanda(sparsity=self.sparsity, pattern=self.pattern)
