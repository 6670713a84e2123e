"""Wanda (2306.11695): prune by |w_ij| x ||X_j||_2, compared inside each output row or each group of M inputs.

SparseGPT (2301.00774): choose the mask along the sweep, and let later columns answer what goes.

Prune by |w|: the baseline. It needs no data and loses badly on language models at 2:4 (METHODS in the README).
"""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from moeprune.dense.methods.kinds import Needs
from moeprune.dense.methods.method import DenseMethod, Pruning

if TYPE_CHECKING:
    import torch

    from moeprune.dense.methods.inputs import InputStatistics
    from moeprune.dense.methods.result import DenseResult


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
        from moeprune.dense.methods.result import DenseResult

        drops = self._drops(weight.abs(), held)
        return DenseResult(weight.masked_fill(drops, 0), drops.logical_not_())


if TYPE_CHECKING:
    import torch

    from moeprune.dense.methods.inputs import InputStatistics
    from moeprune.dense.methods.result import DenseResult


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
        from moeprune.dense.methods.result import DenseResult

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
        from moeprune.dense.methods.patterns import Fixed
        from moeprune.dense.methods.sweep import swept_result

        drops = self._drops(wanda_scores(weight, statistics), held)
        return swept_result(weight, statistics, self.damping, choice=Fixed(drops.logical_not_()))

    def _weights_only(self) -> DenseMethod:
        return Magnitude(sparsity=self.sparsity, pattern=self.pattern)

    def _without_hessian(self) -> DenseMethod:
        return Wanda(sparsity=self.sparsity, pattern=self.pattern)


if TYPE_CHECKING:
    import torch

    from moeprune.dense.methods.inputs import InputStatistics
    from moeprune.dense.methods.patterns import Choice
    from moeprune.dense.methods.result import DenseResult


def sparsegpt_choice(options: Pruning) -> "Choice":
    """N:M chosen at each group, or the share chosen over all rows of each block of 128 columns."""
    from moeprune.dense.methods.patterns import Groups, Pattern, Ratio

    if options.pattern is not None:
        return Groups(Pattern.parse(options.pattern))
    assert options.sparsity is not None
    return Ratio(options.sparsity)


class SparseGPT(Pruning):
    name: Literal["sparsegpt"] = "sparsegpt"
    by_row: ClassVar[bool] = False
    needs: ClassVar[Needs] = "hessian"

    damping: float = Field(default=0.01, gt=0, le=1)  # of the Hessian's mean diagonal

    def _compress(
        self,
        weight: "torch.Tensor",
        statistics: "InputStatistics",
        held: "torch.Tensor | None",
        scale_dtype: "torch.dtype",
    ) -> "DenseResult":
        from moeprune.dense.methods.sweep import swept_result

        return swept_result(weight, statistics, self.damping, choice=sparsegpt_choice(self), held=held)

    def _weights_only(self) -> DenseMethod:
        return Magnitude(sparsity=self.sparsity, pattern=self.pattern)

    def _without_hessian(self) -> DenseMethod:
        return Wanda(sparsity=self.sparsity, pattern=self.pattern)
