"""The exact solver: every set up to twenty experts, branch and bound beyond."""

from dataclasses import replace
from typing import Literal

from pydantic import Field

from moeprune.artifacts.errors import InputError
from moeprune.selection.branch import prove
from moeprune.selection.enumeration import few_sets
from moeprune.selection.problem import Problem, Solution
from moeprune.selection.reformulation import reformulation
from moeprune.selection.search import moves_of
from moeprune.selection.solver import enumerated, local_optimum
from moeprune.selection.swap import Swap

ENUMERATED_SETS = 200_000  # all of 10 of 20 experts


class Exact(Swap):
    """A proved optimum, or the best set and an honest gap when `time_limit` (seconds) or `max_nodes` is reached."""

    name: Literal["exact"] = "exact"  # type: ignore[assignment]
    time_limit: float = Field(default=60.0, gt=0)
    max_nodes: int = Field(default=1_000_000, ge=1)

    def search(self, problem: Problem) -> Solution:
        if few_sets(problem, ENUMERATED_SETS):
            return enumerated(problem)
        if problem.objective.quadratic is None:
            raise InputError(
                f"selection.solver: beyond {ENUMERATED_SETS} sets exact needs a quadratic criterion; use swap"
            )
        start = super().search(problem)
        warnings = list(start.warnings)
        convex = reformulation(problem, warnings)
        proof = prove(problem, start.pruned, convex, max_nodes=self.max_nodes, time_limit=self.time_limit)
        solution = local_optimum(moves_of(problem.objective), problem, [proof.pruned], [*warnings, *proof.warnings])
        if proof.finished:
            return replace(solution, status="proved_optimal", bound=solution.cost)
        return replace(solution, status="time_limit", bound=min(proof.bound, solution.cost))
