"""How many experts each layer gives under one budget for all layers."""

from collections.abc import Mapping, Sequence

import numpy as np

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.statistics import Layer
from moeprune.selection.budget import LayerBudget, kept_range, requested_count, step
from moeprune.selection.constraints import cheapest_feasible
from moeprune.selection.layer import LayerTask
from moeprune.selection.options import Budget
from moeprune.selection.search import descend, greedy_backward, greedy_forward, moves_of
from moeprune.selection.solver import best_of


def cost_curve(task: LayerTask, counts: Sequence[int]) -> dict[int, float]:
    """Count -> cost of pruning that many experts, by swap search from greedy sets and from the next smaller count's.

    Original units; infinite where no set satisfies the constraints.
    """
    curve: dict[int, float] = {}
    before: np.ndarray | None = None
    for count in sorted(counts):
        best = _best_set(task, count, before)
        curve[count] = np.inf if best is None else task.objective.cost(best)
        before = best
    return curve


def _best_set(task: LayerTask, count: int, before: np.ndarray | None) -> np.ndarray | None:
    problem, fixed, free = task.problem(count)
    if (problem.quota > [len(ids) for ids in problem.members()]).any():
        return None
    moves = moves_of(problem.objective)
    starts = [greedy_forward(moves, problem), greedy_backward(moves, problem)]
    if before is not None and not before[fixed].sum() < len(fixed):
        starts.append(greedy_forward(moves, problem, start=before[free]))
    starts = [start for start in starts if problem.feasible(start)]
    if not starts:
        feasible = cheapest_feasible(problem, np.zeros(problem.size))
        if feasible is None:
            return None
        starts = [feasible]
    best = best_of(moves, [descend(moves, problem, start) for start in starts])
    return task.widen(best, fixed, free)


def allocate(
    tasks: Sequence[LayerTask], scales: Sequence[float], budget: Budget, must_keep: Mapping[str, tuple[int, ...]]
) -> tuple[list[LayerBudget], list[str]]:
    """One budget per layer, the sum of costs over `scales` least: min-plus dynamic programming, exact for the curves.

    Layers keep multiples between floor and ceiling. The number pruned in all is the largest attainable one up to what
    the budget asks for (a fraction of all experts, or a count times the number of layers); a sentence says when it is
    less. Raises InputError when none is attainable.
    """
    layers = [task.layer for task in tasks]
    total = sum(layer.num_experts for layer in layers)
    wanted = budget.prune * len(layers) if isinstance(budget.prune, int) else requested_count(budget.prune, total)
    counts = [_counts(layer, budget, must_keep.get(layer.name, ())) for layer in layers]
    least, most = (sum(pick(options) for options in counts) for pick in (min, max))
    asked = f"selection.budget.prune: {budget.prune} asks for {wanted} of {total} experts"
    limits = f"floor, ceiling, multiple_of, must_keep and the routers allow {least} to {most}"
    if not max(least, 1) <= wanted <= most:
        raise InputError(f"{asked}, but {limits}; change prune or one of them")
    curves = [
        {count: cost / scale for count, cost in cost_curve(task, options).items()}
        for task, options, scale in zip(tasks, counts, scales)
    ]
    chosen = _cheapest_split(curves, wanted)
    if chosen is None or not any(chosen):
        raise InputError(f"{asked}, but nothing can go: {limits}, less what keep_at_least forbids")
    warnings = [] if sum(chosen) == wanted else [f"{asked}, {sum(chosen)} go: {limits} in steps"]
    budgets = [
        LayerBudget(layer, count, count, tuple(must_keep.get(layer.name, ()))) for layer, count in zip(layers, chosen)
    ]
    return budgets, warnings


def _counts(layer: Layer, budget: Budget, must_keep: tuple[int, ...]) -> list[int]:
    """The numbers of experts this layer may give, ascending."""
    kept = kept_range(layer, budget, must_keep)
    if not kept:
        raise InputError(
            f"{layer.name}: no kept count is a multiple of {step(layer, budget)} between selection.budget.floor (or "
            "what the router and must_keep need) and selection.budget.ceiling"
        )
    return [layer.num_experts - count for count in reversed(kept)]


def _cheapest_split(curves: list[dict[int, float]], wanted: int) -> list[int] | None:
    """Counts whose sum is the largest attainable up to `wanted`, cheapest; ties go to fewer in earlier layers."""
    best = np.full(wanted + 1, np.inf)  # cheapest cost of the layers so far, by experts pruned
    best[0] = 0.0
    choices = []
    for curve in curves:
        after, choice = np.full(wanted + 1, np.inf), np.full(wanted + 1, -1)
        for count, cost in sorted(curve.items()):
            if count > wanted or not np.isfinite(cost):
                continue
            candidate = np.full(wanted + 1, np.inf)
            candidate[count:] = best[: wanted + 1 - count] + cost
            better = candidate < after
            after[better], choice[better] = candidate[better], count
        best = after
        choices.append(choice)
    attainable = np.flatnonzero(np.isfinite(best))
    if not len(attainable):
        return None
    left, counts = int(attainable[-1]), []
    for choice in reversed(choices):
        counts.append(int(choice[left]))
        left -= counts[-1]
    return counts[::-1]
