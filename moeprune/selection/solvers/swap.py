"""The solvers built on swap search: swap (the default), relaxed, greedy, and thorough (tabu search and crossover)."""

from typing import Literal

import numpy as np
from pydantic import Field

from moeprune.selection.objective import Problem, Solution, WorstOf
from moeprune.selection.solvers import enumeration
from moeprune.selection.solvers.enumeration import few_sets
from moeprune.selection.solvers.reweighting import reweighted
from moeprune.selection.solvers.search import Moves, descend, moves_of, swap_blocks
from moeprune.selection.solvers.solver import (
    Solver,
    best_of,
    enumerated,
    greedy_ends,
    local_optimum,
    random_set,
    relaxed_set,
)


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


class Thorough(Swap):
    """Swap search from `starts` sets, then `rounds` of crossing two of the best ends and improving the child by tabu.

    Roughly ten times the time of `swap`, for the last hundredth of a per cent.
    """

    name: Literal["thorough"] = "thorough"  # type: ignore[assignment]
    rounds: int = Field(default=24, ge=0)
    tabu_steps: int = Field(default=0, ge=0)  # moves of one tabu search; 0 takes four times the number of free experts

    def search(self, problem: Problem) -> Solution:
        warnings: list[str] = []
        moves = moves_of(problem.objective)
        source = np.random.default_rng([self.seed, 1])
        steps = self.tabu_steps or 4 * problem.size
        elite = _distinct(moves, self.ends(moves, problem, warnings))
        elite = _distinct(moves, elite + [tabu(moves, problem, end, steps, source) for end in elite[:2]])
        for _ in range(self.rounds):
            first, second = source.choice(len(elite), 2, replace=False) if len(elite) > 1 else (0, 0)
            child = crossed(moves, problem, elite[first], elite[second], source)
            elite = _distinct(moves, [*elite, tabu(moves, problem, child, steps, source)])[: self.starts]
        return local_optimum(moves, problem, elite, warnings)


def _distinct(moves: Moves, sets: list[np.ndarray]) -> list[np.ndarray]:
    """Different sets, cheapest first, equal costs by lowest ids."""
    by_ids = {tuple(np.flatnonzero(one)): one for one in sets}
    return [one for _, one in sorted(by_ids.items(), key=lambda item: (moves.value(item[1]), item[0]))]


def crossed(
    moves: Moves, problem: Problem, first: np.ndarray, second: np.ndarray, source: np.random.Generator
) -> np.ndarray:
    """Prunes what both parents prune and random ones of what only one does; parents alike give a kick."""
    if problem.side is not None or np.array_equal(first, second):
        return descend(moves, problem, random_set(problem, source))
    child = first & second
    for ids, count in zip(problem.members(), problem.quota):
        open_ids = ids[(first ^ second)[ids]]
        child[source.permutation(open_ids)[: count - int(child[ids].sum())]] = True
    return descend(moves, problem, child)


def tabu(moves: Moves, problem: Problem, start: np.ndarray, steps: int, source: np.random.Generator) -> np.ndarray:
    """The best set on a walk that always takes the best exchange whose experts have not moved lately."""
    moves.start(start)
    members = problem.members()
    free_at = np.zeros(problem.size, dtype=int)  # step at which an expert may move again
    value = best_value = 0.0  # relative to the start
    best = start.copy()
    for step in range(steps):
        move = _best_allowed(moves, problem, members, free_at > step, best_value - value)
        if move is None:
            break
        out, into, change = move
        moves.flip(out)
        moves.flip(into)
        value += change
        # An expert given back stays longer than one just pruned: there are usually fewer good ones to take out.
        free_at[out] = step + 7 + int(source.integers(8))
        free_at[into] = step + 3 + int(source.integers(5))
        if value < best_value - 1e-12 * abs(best_value):
            best_value, best = value, moves.pruned.copy()
    return descend(moves, problem, best)


def _best_allowed(
    moves: Moves, problem: Problem, members: list[np.ndarray], tabu_now: np.ndarray, aspiration: float
) -> tuple[int, int, float] | None:
    """The best exchange of experts that may move, or one that beats the best set so far (change below `aspiration`)."""
    best: tuple[int, int, float] | None = None
    for out, into, costs in swap_blocks(moves, problem, members):
        forbidden = (tabu_now[out][:, None] | tabu_now[into][None, :]) & (costs >= aspiration)
        allowed = np.where(forbidden, np.inf, costs)
        row, column = divmod(int(allowed.argmin()), len(into))
        if allowed[row, column] < (np.inf if best is None else best[2]):
            best = int(out[row]), int(into[column]), float(allowed[row, column])
    return best
