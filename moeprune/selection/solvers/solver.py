"""What all solvers share: options, the cases that need no search, starts and ends of a search."""

import time
from dataclasses import replace

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from moeprune.selection.objective import Problem, Solution, is_modular
from moeprune.selection.solvers.constraints import cheapest_feasible
from moeprune.selection.solvers.enumeration import cheapest_set
from moeprune.selection.solvers.relaxation import RelaxationFailed, round_to_quota, shifted, solve_convex
from moeprune.selection.solvers.search import Moves, greedy_backward, greedy_forward, moves_of, settle_ties


class Solver(BaseModel):
    """Options every solver has. `certificate` adds a lower bound and the gap to it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = Field(default=0, ge=0)
    certificate: bool = False

    def solve(self, problem: Problem) -> Solution:
        """The best set this solver finds, always feasible; ties settled towards the lowest ids.

        A sum of scores is solved exactly whatever the solver, by sorting. The problem must have a feasible set.
        """
        started = time.perf_counter()
        if not problem.quota.any() or problem.quota.sum() == problem.size:
            solution = _forced(problem)
        elif is_modular(problem.objective):
            solution = _sorted(problem) if problem.side is None else _scores_under_constraints(problem)
        else:
            solution = self.search(problem)
        assert problem.feasible(solution.pruned)
        return replace(solution, seconds=time.perf_counter() - started)

    def search(self, problem: Problem) -> Solution:
        raise NotImplementedError


def _forced(problem: Problem) -> Solution:
    """The one set there is when none or all of the free experts go."""
    pruned = np.full(problem.size, bool(problem.quota.any()))
    cost = problem.objective.cost(pruned)
    return Solution(pruned, cost, "proved_optimal", bound=cost)


def scores_of(problem: Problem) -> np.ndarray:
    """The scores (experts,) of an objective that is a sum of scores."""
    matrix = problem.objective.quadratic
    return np.asarray(problem.objective.linear) + (0 if matrix is None else np.diagonal(matrix))


def _sorted(problem: Problem) -> Solution:
    """Lowest scores first inside every group: exact for a sum of scores."""
    scores = scores_of(problem)
    pruned = np.zeros(problem.size, dtype=bool)
    ties: list[tuple[int, int]] = []
    for ids, count in zip(problem.members(), problem.quota):
        order = ids[np.argsort(scores[ids], kind="stable")]
        lowest, others = order[:count], order[count:]
        pruned[lowest] = True
        if len(lowest) and len(others) and scores[lowest[-1]] == scores[others[0]]:
            edge = scores[others[0]]
            ties += [(int(i), int(j)) for i in lowest[scores[lowest] == edge] for j in others[scores[others] == edge]]
    cost = problem.objective.cost(pruned)
    return Solution(pruned, cost, "proved_optimal", bound=cost, ties=tuple(ties))


def _scores_under_constraints(problem: Problem) -> Solution:
    """A sum of scores under side constraints: one integer program."""
    pruned = cheapest_feasible(problem, scores_of(problem))
    assert pruned is not None
    solution = local_optimum(moves_of(problem.objective), problem, [pruned], [])
    return replace(solution, status="proved_optimal", bound=solution.cost)


def greedy_ends(moves: Moves, problem: Problem, *, most: int = 2) -> list[np.ndarray]:
    """The feasible ones of greedy forward and backward; with side constraints at least the cheapest by single costs."""
    ends = [greedy(moves, problem) for greedy in (greedy_forward, greedy_backward)[:most]]
    ends = [end for end in ends if problem.feasible(end)]
    if not ends:
        moves.start(np.zeros(problem.size, dtype=bool))
        feasible = cheapest_feasible(problem, moves.flip_costs())
        assert feasible is not None
        ends = [feasible]
    return ends


def relaxed_set(problem: Problem, warnings: list[str]) -> np.ndarray | None:
    """The rounded convex relaxation; None when there is none, when OSQP did not solve it (a warning) or it breaks a
    side constraint."""
    if problem.objective.quadratic is None:
        return None
    try:
        rounded = round_to_quota(solve_convex(shifted(problem)), problem)
    except RelaxationFailed as error:
        warnings.append(f"the relaxed start was left out: {error}")
        return None
    return rounded if problem.feasible(rounded) else None


def random_set(problem: Problem, source: np.random.Generator) -> np.ndarray:
    """A random feasible set (experts,) bool."""
    if problem.side is not None:
        feasible = cheapest_feasible(problem, source.random(problem.size))
        assert feasible is not None
        return feasible
    pruned = np.zeros(problem.size, dtype=bool)
    for ids, count in zip(problem.members(), problem.quota):
        pruned[source.permutation(ids)[:count]] = True
    return pruned


def enumerated(problem: Problem) -> Solution:
    """The optimum of a small problem, by looking at every set."""
    best = cheapest_set(problem)
    assert best is not None
    solution = local_optimum(moves_of(problem.objective), problem, [best], [])
    return replace(solution, status="proved_optimal", bound=solution.cost)


def best_of(moves: Moves, candidates: list[np.ndarray]) -> np.ndarray:
    """The cheapest set; among equally cheap ones the one whose ids come first."""
    values = np.array([moves.value(candidate) for candidate in candidates])
    limit = values.min() + 1e-12 * np.abs(values).max()
    close = [candidate for candidate, value in zip(candidates, values) if value <= limit]
    return min(close, key=lambda candidate: tuple(np.flatnonzero(candidate)))


def local_optimum(moves: Moves, problem: Problem, candidates: list[np.ndarray], warnings: list[str]) -> Solution:
    """The best candidate, with its ties settled."""
    pruned, ties = settle_ties(moves, problem, best_of(moves, candidates))
    cost = problem.objective.cost(pruned)
    return Solution(pruned, cost, "local_optimum", ties=ties, warnings=tuple(warnings))
