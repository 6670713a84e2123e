"""Solvers: which experts to prune. Each class is its own config section (`selection.solver`).

All solvers work on one Problem and return one Solution. A sum of scores is solved exactly by sorting, whatever the
solver; status words are those of artifacts.plan, and "proved_optimal" is never said of an unproved set.
"""

import time
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from moeprune.selection.objective import is_modular
from moeprune.selection.problem import Problem, Solution
from moeprune.selection.relaxation import RelaxationFailed, round_to_quota, shifted, solve_convex
from moeprune.selection.search import (
    Moves,
    descend,
    greedy_backward,
    greedy_forward,
    moves_of,
    settle_ties,
)


class Solver(BaseModel):
    """Options every solver has. `certificate` adds a lower bound and the gap to it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = Field(default=0, ge=0)
    certificate: bool = False

    def solve(self, problem: Problem) -> Solution:
        """The best set this solver finds, always feasible; ties settled towards the lowest ids."""
        started = time.perf_counter()
        if is_modular(problem.objective) and problem.side is None:
            solution = _sorted(problem)
        elif not problem.quota.any() or problem.quota.sum() == problem.size:
            solution = _forced(problem)
        else:
            solution = self.search(problem)
        assert problem.feasible(solution.pruned)
        return replace(solution, seconds=time.perf_counter() - started)

    def search(self, problem: Problem) -> Solution:
        raise NotImplementedError


def _sorted(problem: Problem) -> Solution:
    """Lowest scores first inside every group: exact for a sum of scores."""
    matrix = problem.objective.quadratic
    scores = np.asarray(problem.objective.linear) + (0 if matrix is None else np.diagonal(matrix))
    pruned = np.zeros(problem.size, dtype=bool)
    ties: list[tuple[int, int]] = []
    for ids, count in zip(problem.members(), problem.quota):
        order = ids[np.argsort(scores[ids], kind="stable")]
        gone, stay = order[:count], order[count:]
        pruned[gone] = True
        if len(gone) and len(stay) and scores[gone[-1]] == scores[stay[0]]:
            edge = scores[stay[0]]
            ties += [(int(i), int(j)) for i in gone[scores[gone] == edge] for j in stay[scores[stay] == edge]]
    cost = problem.objective.cost(pruned)
    return Solution(pruned, cost, "proved_optimal", bound=cost, ties=tuple(ties))


def _forced(problem: Problem) -> Solution:
    """The one set there is when none or all of the free experts go."""
    pruned = np.full(problem.size, bool(problem.quota.any()))
    cost = problem.objective.cost(pruned)
    return Solution(pruned, cost, "proved_optimal", bound=cost)


def best_of(moves: Moves, problem: Problem, candidates: list[np.ndarray]) -> np.ndarray:
    """The cheapest set; among equally cheap ones the one whose ids come first."""
    values = np.array([moves.value(candidate) for candidate in candidates])
    limit = values.min() + 1e-12 * np.abs(values).max()
    close = [candidate for candidate, value in zip(candidates, values) if value <= limit]
    return min(close, key=lambda candidate: tuple(np.flatnonzero(candidate)))


def local_optimum(moves: Moves, problem: Problem, candidates: list[np.ndarray], warnings: list[str]) -> Solution:
    pruned, ties = settle_ties(moves, problem, best_of(moves, problem, candidates))
    cost = problem.objective.cost(pruned)
    return Solution(pruned, cost, "local_optimum", ties=ties, warnings=tuple(warnings))


def random_set(problem: Problem, source: np.random.Generator) -> np.ndarray:
    pruned = np.zeros(problem.size, dtype=bool)
    for ids, count in zip(problem.members(), problem.quota):
        pruned[source.permutation(ids)[:count]] = True
    return pruned


def relaxed_set(problem: Problem, warnings: list[str]) -> np.ndarray | None:
    """The rounded convex relaxation, or None (with a warning) when OSQP did not solve it."""
    if problem.objective.quadratic is None:
        return None
    try:
        return round_to_quota(solve_convex(shifted(problem)), problem)
    except RelaxationFailed as error:
        warnings.append(f"the relaxed start was left out: {error}")
        return None


class Swap(Solver):
    """Best-improvement swap search from `starts` sets: greedy forward and backward, relaxed and rounded, random ones.

    Stops where no exchange of one pruned and one kept expert lowers the cost, and returns the best of the ends.
    """

    name: Literal["swap"] = "swap"
    starts: int = Field(default=16, ge=1, le=10_000)

    def search(self, problem: Problem) -> Solution:
        warnings: list[str] = []
        moves = moves_of(problem.objective)
        ends = [descend(moves, problem, start) for start in self._starts(moves, problem, warnings)]
        return local_optimum(moves, problem, ends, warnings)

    def _starts(self, moves: Moves, problem: Problem, warnings: list[str]) -> list[np.ndarray]:
        starts = [greedy_forward(moves, problem)]
        if self.starts > 1:
            starts.append(greedy_backward(moves, problem))
        relaxed = relaxed_set(problem, warnings) if self.starts > 2 else None
        if relaxed is not None:
            starts.append(relaxed)
        source = np.random.default_rng(self.seed)
        starts += [random_set(problem, source) for _ in range(self.starts - len(starts))]
        return [start for start in starts if problem.feasible(start)]


class Greedy(Solver):
    """The better of greedy forward (prune the cheapest) and backward (give back the dearest), without any exchange."""

    name: Literal["greedy"] = "greedy"

    def search(self, problem: Problem) -> Solution:
        moves = moves_of(problem.objective)
        ends = [greedy_forward(moves, problem), greedy_backward(moves, problem)]
        pruned = best_of(moves, problem, [end for end in ends if problem.feasible(end)])
        return Solution(pruned, problem.objective.cost(pruned), "local_optimum")


class Relaxed(Solver):
    """The convex relaxation (OSQP), rounded to the largest entries, then repaired by swap search."""

    name: Literal["relaxed"] = "relaxed"

    def search(self, problem: Problem) -> Solution:
        warnings: list[str] = []
        moves = moves_of(problem.objective)
        start = relaxed_set(problem, warnings)
        if start is None:
            warnings.append("greedy starts the swap search instead of the relaxation")
            start = greedy_forward(moves, problem)
        return local_optimum(moves, problem, [descend(moves, problem, start)], warnings)


AnySolver = Annotated[Swap | Greedy | Relaxed, Field(discriminator="name")]
