"""Methods that set weights to zero: by magnitude, Wanda (2306.11695), Wanda with an update, SparseGPT (2301.00774).

Magnitude is the baseline: it needs no data, and loses badly on language models at 2:4 (experiments/dense-weights).
"""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from moeprune.dense.methods.kinds import Needs, Pattern
from moeprune.dense.methods.method import DenseMethod, Pruning

if TYPE_CHECKING:
    import torch

    from moeprune.dense.methods.inputs import Conditions, InputStatistics
    from moeprune.dense.methods.patterns import Choice
    from moeprune.dense.methods.result import DenseResult


class Magnitude(Pruning):
    """The smallest |w| of each output row, or of each group of M, go."""

    name: Literal["magnitude"] = "magnitude"
    needs: ClassVar[Needs] = "nothing"

    def _compress(self, weight: "torch.Tensor", given: "Conditions") -> "DenseResult":
        from moeprune.dense.methods.result import DenseResult

        drops = self._drops(weight.abs(), given.held)
        return DenseResult(weight.masked_fill(drops, 0), drops.logical_not_())


def wanda_scores(weight: "torch.Tensor", statistics: "InputStatistics") -> "torch.Tensor":
    """|w_ij| x ||X_j||_2, (out, in)."""
    return (weight * statistics.norms()).abs_()


class Wanda(Pruning):
    """The smallest |w_ij| x ||X_j||_2 of each output row, or of each group of M, go; the others are not changed."""

    name: Literal["wanda"] = "wanda"
    needs: ClassVar[Needs] = "norms"

    def _compress(self, weight: "torch.Tensor", given: "Conditions") -> "DenseResult":
        from moeprune.dense.methods.result import DenseResult

        drops = self._drops(wanda_scores(weight, given.statistics), given.held)
        dead = int((given.statistics.square_sum == 0).sum())
        return DenseResult(weight.masked_fill(drops, 0), drops.logical_not_(), dead_columns=dead)

    def _weights_only(self) -> DenseMethod:
        return Magnitude(sparsity=self.sparsity, pattern=self.pattern)


class HessianPruning(Pruning):
    """Later columns answer what goes along a sweep. Without a Hessian that can be factorised it is Wanda."""

    needs: ClassVar[Needs] = "hessian"

    def _weights_only(self) -> DenseMethod:
        return Magnitude(sparsity=self.sparsity, pattern=self.pattern)

    def _without_hessian(self) -> DenseMethod:
        return Wanda(sparsity=self.sparsity, pattern=self.pattern)

    def _choice(self) -> "Choice":
        """N:M chosen at each group, or the share chosen over all rows of each block of 128 columns."""
        from moeprune.dense.methods.patterns import Groups, Ratio

        if self.pattern is not None:
            return Groups(Pattern.parse(self.pattern))
        assert self.sparsity is not None
        return Ratio(self.sparsity)


class WandaUpdate(HessianPruning):
    """Wanda's mask, then the surviving weights answer what went (the update of 2301.00774)."""

    name: Literal["wanda_update"] = "wanda_update"

    damping: float = Field(default=0.01, gt=0, le=1)  # of the Hessian's mean diagonal

    def _compress(self, weight: "torch.Tensor", given: "Conditions") -> "DenseResult":
        from moeprune.dense.methods.patterns import Fixed
        from moeprune.dense.methods.sweep import swept_result

        drops = self._drops(wanda_scores(weight, given.statistics), given.held)
        return swept_result(weight, given.statistics, self.damping, choice=Fixed(drops.logical_not_()))


class SparseGPT(HessianPruning):
    """The mask is chosen along the sweep: the smallest (w R_ii)^2, R_ii what a change of the column costs by then."""

    name: Literal["sparsegpt"] = "sparsegpt"
    by_row: ClassVar[bool] = False

    damping: float = Field(default=0.01, gt=0, le=1)  # of the Hessian's mean diagonal

    def _compress(self, weight: "torch.Tensor", given: "Conditions") -> "DenseResult":
        from moeprune.dense.methods.sweep import swept_result

        return swept_result(weight, given.statistics, self.damping, choice=self._choice(), held=given.held)
