"""How many experts each layer gives under one budget for all layers."""

from collections.abc import Sequence

import numpy as np

from moeprune.artifacts.errors import InputError
from moeprune.selection.budget import global_counts
from moeprune.selection.layer import LayerTask
from moeprune.selection.options import Budget
from moeprune.selection.solvers.constraints import cheapest_feasible
from moeprune.selection.solvers.search import descend, greedy_backward, greedy_forward, moves_of
from moeprune.selection.solvers.solver import best_of


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


def allocate(tasks: Sequence[LayerTask], scales: Sequence[float], budget: Budget) -> tuple[list[int], list[str]]:
    """The count each layer prunes, the sum of costs over `scales` least: min-plus dynamic programming, exact for the
    curves.

    Layers keep multiples between floor and ceiling. The number pruned in all is the largest attainable one up to what
    the budget asks for (a fraction of all experts, or a count times the number of layers); a sentence says when it is
    less. Raises InputError when none is attainable.
    """
    must_keep = {task.layer.name: task.must_keep for task in tasks}
    counts, wanted = global_counts([task.layer for task in tasks], budget, must_keep)
    curves = [
        {count: cost / scale for count, cost in cost_curve(task, options).items()}
        for task, options, scale in zip(tasks, counts, scales)
    ]
    chosen = cheapest_split(curves, wanted)
    if chosen is None or not any(chosen):
        raise InputError(
            f"selection.budget.prune: {budget.prune} asks for {wanted} experts in all, but steps and keep_at_least let "
            "none go; prune more or lower keep_at_least"
        )
    warnings = []
    if sum(chosen) != wanted:
        warnings.append(f"the budget asks for {wanted} experts in all; {sum(chosen)} go, the nearest the steps allow")
    return chosen, warnings


def cheapest_split(curves: list[dict[int, float]], wanted: int) -> list[int] | None:
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
