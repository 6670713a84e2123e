"""SparseGPT (2301.00774): choose the mask along the sweep, and let later columns answer what goes."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from moeprune.dense.magnitude import Magnitude
from moeprune.dense.method import DenseMethod, Needs, Pruning
from moeprune.dense.wanda import Wanda

if TYPE_CHECKING:
    import torch

    from moeprune.dense.choice import Choice
    from moeprune.dense.result import DenseResult
    from moeprune.dense.statistics import InputStatistics


def sparsegpt_choice(options: Pruning) -> "Choice":
    """N:M chosen at each group, or the share chosen over all rows of each block of 128 columns."""
    from moeprune.dense.choice import Groups, Ratio
    from moeprune.dense.patterns import Pattern

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
        from moeprune.dense.obs import swept_result

        return swept_result(weight, statistics, self.damping, choice=sparsegpt_choice(self), held=held)

    def _weights_only(self) -> DenseMethod:
        return Magnitude(sparsity=self.sparsity, pattern=self.pattern)

    def _without_hessian(self) -> DenseMethod:
        return Wanda(sparsity=self.sparsity, pattern=self.pattern)
