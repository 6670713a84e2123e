"""The solvers built on swap search: swap (the default), relaxed, greedy."""

from typing import Literal

import numpy as np
from pydantic import Field

from moeprune.selection import enumeration
from moeprune.selection.enumeration import few_sets
from moeprune.selection.objective import WorstOf
from moeprune.selection.problem import Problem, Solution
from moeprune.selection.reweighting import reweighted
from moeprune.selection.search import Moves, descend, moves_of
from moeprune.selection.solver import Solver, best_of, enumerated, greedy_ends, local_optimum, random_set, relaxed_set


class Swap(Solver):
    """Best-improvement swap search from `starts` sets: greedy forward and backward, relaxed and rounded, random ones.

    Stops where no exchange of one pruned and one kept expert lowers the cost, and returns the best of the ends. Where
    there are only a few thousand sets (half of up to 16 experts) it looks at all of them.
    """

    name: Literal["swap"] = "swap"
    starts: int = Field(default=16, ge=1, le=10_000)

    def search(self, problem: Problem) -> Solution:
        if few_sets(problem, enumeration.ENUMERATE):
            return enumerated(problem)
        warnings: list[str] = []
        moves = moves_of(problem.objective)
        return local_optimum(moves, problem, self.ends(moves, problem, warnings), warnings)

    def ends(self, moves: Moves, problem: Problem, warnings: list[str]) -> list[np.ndarray]:
        """Where the search ends from every start."""
        starts = greedy_ends(moves, problem, most=self.starts)
        if isinstance(problem.objective, WorstOf):
            starts += reweighted(problem, problem.objective).sets
        relaxed = relaxed_set(problem, warnings) if self.starts > len(starts) else None
        if relaxed is not None:
            starts.append(relaxed)
        source = np.random.default_rng(self.seed)
        starts += [random_set(problem, source) for _ in range(self.starts - len(starts))]
        return [descend(moves, problem, start) for start in starts]


class Relaxed(Solver):
    """The convex relaxation (OSQP), rounded to the largest entries, then repaired by swap search."""

    name: Literal["relaxed"] = "relaxed"

    def search(self, problem: Problem) -> Solution:
        warnings: list[str] = []
        moves = moves_of(problem.objective)
        start = relaxed_set(problem, warnings)
        if start is None:
            start = best_of(moves, greedy_ends(moves, problem))
            warnings.append("there is no usable relaxation here; greedy starts the swap search instead")
        return local_optimum(moves, problem, [descend(moves, problem, start)], warnings)


class Greedy(Solver):
    """The better of greedy forward (prune the cheapest) and backward (give back the dearest), without any exchange."""

    name: Literal["greedy"] = "greedy"

    def search(self, problem: Problem) -> Solution:
        moves = moves_of(problem.objective)
        pruned = best_of(moves, greedy_ends(moves, problem))
        return Solution(pruned, problem.objective.cost(pruned), "local_optimum")
