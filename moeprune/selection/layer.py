"""One layer: its problem, and its solution over all experts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.statistics import Layer
from moeprune.selection.budget import group_of
from moeprune.selection.criteria.criterion import LayerEvidence
from moeprune.selection.criteria.table import ScoringCriterion
from moeprune.selection.objective import Objective, Problem, SideConstraints, Solution, restrict
from moeprune.selection.protection import Protection
from moeprune.selection.solvers.certificate import certified
from moeprune.selection.solvers.constraints import kept_mass, require_feasible
from moeprune.selection.solvers.solver import Solver


@dataclass(frozen=True)
class LayerTask:
    """A layer's cost over all experts, the experts that must stay, and what kept experts must hold of each domain."""

    layer: Layer
    objective: Objective
    dead: np.ndarray  # (experts,) bool: never routed
    must_keep: tuple[int, ...]
    mass: SideConstraints | None

    def problem(self, prune: int) -> tuple[Problem, np.ndarray, np.ndarray]:
        """The problem of pruning so many experts, over the free ones; ids of the dead that go first, ids of the free.

        Dead experts go lowest id first, as many as the groups allow. Raises InputError when constraints clash.
        """
        group = group_of(self.layer)
        share = prune // self.layer.num_groups
        may_go = np.ones(self.layer.num_experts, dtype=bool)
        may_go[list(self.must_keep)] = False
        fixed = np.concatenate(
            [np.flatnonzero(self.dead & may_go & (group == index))[:share] for index in range(self.layer.num_groups)]
        )
        may_go[fixed] = False
        free = np.flatnonzero(may_go)
        quota = np.full(self.layer.num_groups, share) - np.bincount(group[fixed], minlength=self.layer.num_groups)
        side = None
        if self.mass is not None:
            side = replace(self.mass, weights=self.mass.weights[:, free])  # dead experts hold nothing
        return Problem(restrict(self.objective, free, fixed), group[free], quota, side), fixed, free

    def widen(self, pruned: np.ndarray, fixed: np.ndarray, free: np.ndarray) -> np.ndarray:
        """The set over all experts for a set over the free ones."""
        wide = np.zeros(self.layer.num_experts, dtype=bool)
        wide[fixed] = True
        wide[free[pruned]] = True
        return wide


def layer_tasks(
    evidence: Sequence[LayerEvidence], criterion: ScoringCriterion, protected: Protection
) -> list[LayerTask]:
    """The task of every layer. Raises InputError when the criterion's costs are not finite."""
    return [
        LayerTask(
            item.layer,
            _finite(criterion.objective(item), item.layer.name),
            item.dead,
            protected.must_keep.get(item.layer.name, ()),
            kept_mass(item, protected.shares),
        )
        for item in evidence
    ]


def _finite(objective: Objective, name: str) -> Objective:
    for values in (objective.linear, objective.quadratic):
        if values is not None and not np.isfinite(values).all():
            raise InputError(f"{name}: some costs are not finite; the statistics are damaged, record again")
    return objective


def solve_layer(task: LayerTask, prune: int, solver: Solver) -> Solution:
    """The solution over all experts: dead ones first, then the solver on the rest, then (on request) the bound."""
    problem, fixed, free = task.problem(prune)
    require_feasible(problem, task.layer.name)
    solution = solver.solve(problem)
    warnings = list(solution.warnings)
    if solver.certificate:
        solution, sentences = certified(problem, solution)
        warnings += sentences
    pruned = task.widen(solution.pruned, fixed, free)
    cost = task.objective.cost(pruned)
    bound = solution.bound
    if bound is not None:
        # The problem leaves out a constant: the cost of the dead experts, 0 unless the objective says otherwise.
        bound = cost if solution.status == "proved_optimal" else min(cost, bound + cost - solution.cost)
    ties = tuple((int(free[i]), int(free[j])) for i, j in solution.ties)
    return replace(solution, pruned=pruned, cost=cost, bound=bound, ties=ties, warnings=tuple(warnings))
