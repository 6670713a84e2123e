"""Certificates: a safe lower bound, and the status a solution earns by it."""

import math
from dataclasses import dataclass, replace

import numpy as np

from moeprune.selection.objective import Problem, Solution, WorstOf
from moeprune.selection.solvers import enumeration
from moeprune.selection.solvers.enumeration import cheapest_set, few_sets
from moeprune.selection.solvers.exact import prove
from moeprune.selection.solvers.relaxation import reformulation, row_bound, scaled_program
from moeprune.selection.solvers.reweighting import reweighted

NODE_EXPERTS = 60_000  # branch and bound spends this many nodes x experts on a certificate: a fraction of a second
PROVED = 1e-9  # a relative gap below this is rounding: the set is optimal


@dataclass(frozen=True)
class Bound:
    """A lower bound in the objective's unit, and how it came about."""

    value: float
    method: str
    warnings: tuple[str, ...] = ()


def lower_bound(problem: Problem, incumbent: np.ndarray) -> Bound | None:
    """The best safe bound this module has for the problem, or None where there is none: no quadratic form.

    The semidefinite bound, raised by a short branch and bound that ends after a fixed number of nodes (not of seconds,
    so that it is the same on every machine). `incumbent` is the best known set.
    """
    if few_sets(problem, enumeration.ENUMERATE):
        best = cheapest_set(problem)
        assert best is not None
        return Bound(problem.objective.cost(best), "all sets")
    if isinstance(problem.objective, WorstOf):
        below = reweighted(problem, problem.objective)
        bound, _ = _quadratic_bound(below.problem, incumbent)
        return replace(bound, value=bound.value + below.constant, method=f"{bound.method}, weighted sum")
    if problem.objective.linear is None or problem.objective.quadratic is None:
        return None
    bound, best = _quadratic_bound(problem, incumbent)
    if np.array_equal(best, incumbent):
        return bound
    cheaper = f"the certificate came across a cheaper set ({problem.objective.cost(best):.6g}); solver exact takes it"
    return replace(bound, warnings=(*bound.warnings, cheaper))


def _quadratic_bound(problem: Problem, incumbent: np.ndarray) -> tuple[Bound, np.ndarray]:
    """The bound, and the best set seen on the way."""
    warnings: list[str] = []
    scaled, scale = scaled_program(problem)
    cheap = row_bound(scaled) * scale
    convex = reformulation(problem, warnings)
    nodes = max(1, NODE_EXPERTS // problem.size) if convex.semidefinite else 1
    proof = prove(problem, incumbent, convex, max_nodes=nodes)
    method = "semidefinite" if convex.semidefinite else "cheap"
    return Bound(max(proof.bound, cheap), method, (*warnings, *proof.warnings)), proof.pruned


def certified(problem: Problem, solution: Solution) -> tuple[Solution, list[str]]:
    """The solution with a lower bound and the status it earns, and warnings about the bound."""
    if solution.bound is not None:
        return solution, []
    bound = lower_bound(problem, solution.pruned)
    if bound is None:
        return solution, ["this criterion has no quadratic form, so there is no bound"]
    assert bound.value <= solution.cost + PROVED * abs(solution.cost), "a bound above a feasible cost"
    value = min(bound.value, solution.cost)
    proved = gap_of(solution.cost, value) <= PROVED
    if not proved:
        # Six digits of the gap are enough, and no more than that is the same on any number of threads.
        value = solution.cost - math.ceil(gap_of(solution.cost, value) * 1e6) / 1e6 * abs(solution.cost)
    better = "proved_optimal" if proved else "certified_gap" if solution.status == "local_optimum" else solution.status
    return replace(solution, bound=solution.cost if proved else value, status=better), list(bound.warnings)


def gap_of(cost: float, bound: float) -> float:
    """(cost - bound) / |cost|, 0 when both are the same."""
    return 0.0 if cost == bound else (cost - bound) / abs(cost) if cost else math.inf
