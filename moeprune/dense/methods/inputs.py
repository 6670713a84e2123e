"""What a linear layer's calibration inputs leave behind: sums that the kernels need, no activations."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from moeprune.artifacts.errors import InputError
from moeprune.dense.methods.kinds import Needs


@dataclass
class InputStatistics:
    """Sums over the counted input rows x (tokens, in) of one layer.

    The Hessian is the plain sum of x x' in float32 (each batch's product is one matrix multiplication, so the number of
    float32 additions is the number of batches); the vectors are float64. Nothing is divided by the number of tokens:
    every method here is invariant to that factor.
    """

    layer: str  # the name that messages use
    in_features: int
    needs: Needs = "hessian"
    device: torch.device | str = "cpu"
    tokens: int = 0
    square_sum: torch.Tensor = field(init=False)  # (in,) sum of x_j^2
    absolute_sum: torch.Tensor = field(init=False)  # (in,) sum of |x_j|
    hessian: torch.Tensor | None = field(init=False, default=None)  # (in, in) sum of x x'
    factors: dict[tuple[float, bool], Any] = field(init=False, default_factory=dict)  # made from it by the sweep

    def __post_init__(self) -> None:
        self.square_sum = torch.zeros(self.in_features, dtype=torch.float64, device=self.device)
        self.absolute_sum = torch.zeros_like(self.square_sum)
        if self.needs == "hessian":
            self.hessian = torch.zeros(self.in_features, self.in_features, device=self.device)

    def add(self, rows: torch.Tensor, *, source: Callable[[int], str] = "row {}".format) -> None:
        """Add input rows (tokens, in) of any float type.

        Raises InputError for NaN or infinity and adds nothing; `source` says where the first bad row comes from.
        """
        assert rows.ndim == 2, "rows are (tokens, in)"
        assert rows.shape[1] == self.in_features, f"{self.layer}: {rows.shape[1]} inputs, expected {self.in_features}"
        if self.needs == "nothing" or rows.shape[0] == 0:
            self.tokens += rows.shape[0]
            return
        rows = rows.detach().to(self.device, torch.float32)
        squares = rows.square().sum(0, dtype=torch.float64)
        if not bool(torch.isfinite(squares).all()):
            bad = (~torch.isfinite(squares)).nonzero().flatten().tolist()
            row = int((~torch.isfinite(rows.square().sum(1))).nonzero().flatten()[:1].sum())
            raise InputError(
                f"{self.layer}: NaN, infinity or overflow in {len(bad)} input channels (first: {bad[0]}) "
                f"from {source(row)}; remove that record or run the model in a wider dtype"
            )
        self.tokens += rows.shape[0]
        self.factors.clear()
        self.square_sum += squares
        self.absolute_sum += rows.abs().sum(0, dtype=torch.float64)
        if self.hessian is not None:
            self.hessian.addmm_(rows.T, rows)

    def called(self, layer: str) -> "InputStatistics":
        """The same sums under another layer's name: layers that read the same tensor share them."""
        other = copy.copy(self)
        other.layer = layer
        return other

    def norms(self) -> torch.Tensor:
        """Input norms ||X_j||_2 (in,), float32."""
        return self.square_sum.sqrt().float()

    def mean_absolute(self) -> torch.Tensor:
        """Mean of |x_j| (in,), float32."""
        return (self.absolute_sum / max(self.tokens, 1)).float()

    def output_energy(self, weight: torch.Tensor) -> float:
        """||W X||^2 = sum of (W H) * W for a weight (out, in); of a difference of weights: the squared output error."""
        assert self.hessian is not None, "the output error needs the Hessian"
        return float(torch.sum((weight @ self.hessian) * weight, dtype=torch.float64))


@dataclass(frozen=True)
class Conditions:
    """What a method goes by beside the weight itself."""

    statistics: InputStatistics
    held: torch.Tensor | None  # (out, in) bool: what an earlier step pruned (False) stays exactly zero
    scale_dtype: torch.dtype  # how scales are stored
