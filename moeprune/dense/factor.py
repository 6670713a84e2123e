"""The damped Cholesky factor that the sweep walks along."""

from dataclasses import dataclass

import torch

DAMPING_CAP = 1.0  # of the mean diagonal: beyond it the inputs' correlations no longer decide anything
DAMPING_STEP = 10.0


class NotPositiveDefinite(ArithmeticError):
    """The Hessian stayed numerically indefinite up to the damping cap."""


@dataclass(frozen=True)
class Factor:
    """H + damping = R R' with R upper triangular, columns in processing order.

    R_ii^2 is the inverse of the first diagonal entry of inv(H[i:, i:]): what an error in column i costs when all later
    columns may still answer. The textbook sweep needs R's inverse; written on R itself, no matrix is inverted.
    """

    spread: torch.Tensor  # (in, in): R with every column divided by its diagonal; the strict upper part is used
    diagonal: torch.Tensor  # (in,): R_ii
    dead: torch.Tensor  # (in,) bool: inputs that were always zero
    damping: float
    steps: int


def factorise(hessian: torch.Tensor, damping: float, *, order: torch.Tensor | None = None) -> Factor:
    """The factor of H + damping * mean(diag H) * I, damping raised tenfold until it succeeds.

    Dead inputs get a diagonal of 1. Raises NotPositiveDefinite beyond DAMPING_CAP.
    """
    if order is not None:
        hessian = hessian[order][:, order]
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    live_mean = diagonal[~dead].mean() if not bool(dead.all()) else torch.ones((), device=hessian.device)
    reversed_hessian = hessian.flip(0, 1)  # Cholesky of the reversed matrix, reversed back, is the upper factor
    base = torch.where(dead, torch.ones_like(diagonal), diagonal).flip(0)
    steps = 0
    while damping <= DAMPING_CAP * (1 + 1e-9):
        reversed_hessian.diagonal().copy_(base + damping * live_mean)
        lower, info = torch.linalg.cholesky_ex(reversed_hessian)
        if int(info) == 0:
            upper = lower.flip(0, 1)
            root = upper.diagonal().clone()
            return Factor(upper.div_(root), root, dead, damping, steps)
        damping *= DAMPING_STEP
        steps += 1
    raise NotPositiveDefinite(f"not positive definite at damping {damping / DAMPING_STEP:g}")
