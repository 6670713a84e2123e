"""From a layer's statistics to a swept weight: factor, sweep, and what is reported."""

import torch

from moeprune.dense.choice import Choice
from moeprune.dense.factor import Factor, factorise
from moeprune.dense.grids import IntegerGrid
from moeprune.dense.result import DenseResult, Grid
from moeprune.dense.statistics import InputStatistics
from moeprune.dense.sweep import sweep


def swept_result(
    weight: torch.Tensor,
    statistics: InputStatistics,
    damping: float,
    *,
    choice: Choice | None = None,
    grid: IntegerGrid | None = None,
    held: torch.Tensor | None = None,
    activation_order: bool = False,
) -> DenseResult:
    """`sweep` on the statistics' Hessian; `activation_order` processes the inputs with the largest sums first.

    Raises NotPositiveDefinite when damping reaches its cap.
    """
    factor, order = _factor(statistics, damping, activation_order)
    swept = sweep(weight, factor, choice=choice, grid=grid, held=held, order=order)
    warnings = []
    if factor.steps:
        warnings.append(
            f"{statistics.layer}: damping raised {factor.steps} times, from {damping:g} to {factor.damping:g}"
        )
    return DenseResult(
        swept.weight,
        swept.mask,
        None if grid is None or swept.scale is None else _layout(grid, swept.scale, swept.zero),
        damping=factor.damping,
        damping_steps=factor.steps,
        dead_columns=int(factor.dead.sum()),
        warnings=warnings,
    )


def _factor(statistics: InputStatistics, damping: float, activation_order: bool) -> tuple[Factor, torch.Tensor | None]:
    """The factor and its order, kept with the statistics: query, key and value, or gate and up, share their inputs."""
    key = (damping, activation_order)
    if key not in statistics.factors:
        hessian = statistics.hessian
        assert hessian is not None, "this method needs the Hessian"
        order = torch.argsort(hessian.diagonal(), descending=True, stable=True) if activation_order else None
        statistics.factors[key] = (factorise(hessian, damping, order=order), order)
    return statistics.factors[key]


def _layout(grid: IntegerGrid, scale: torch.Tensor, zero: torch.Tensor | None) -> Grid:
    return Grid("int", grid.bits, grid.group_size, grid.symmetric, scale, zero)
