"""Greedy construction and best-improvement swap search over sets of pruned experts.

For a quadratic cost every flip and swap is O(1) from the vector F p: pruning j adds
l_j + F_jj + 2 (Fp)_j, giving i back saves l_i - F_ii + 2 (Fp)_i, and doing both adds the difference less 2 F_ij.
Matrices are scaled by a power of two first, so a set does not depend on the unit of F and no bit is lost.
"""

import math
from typing import Protocol

import numpy as np

from moeprune.selection.objective import Objective, Problem

REFRESH = 64  # moves after which F p is summed anew, so that rounding does not pile up
TIE = 1e-12  # relative to the largest flip cost: exchanges closer to 0 than this are ties


class Moves(Protocol):
    """A set of pruned experts that can be changed, and what every change would cost."""

    pruned: np.ndarray

    def start(self, pruned: np.ndarray) -> None: ...

    def flip(self, expert: int) -> None: ...

    def flip_costs(self) -> np.ndarray: ...

    def swap_costs(self, out: np.ndarray, into: np.ndarray) -> np.ndarray:
        """(out, into): give `out` back, prune `into` instead."""
        ...

    def value(self, pruned: np.ndarray) -> float:
        """Cost of any set, in the unit of the other costs, up to a constant."""
        ...


class QuadraticMoves:
    """Moves on l'p + p'Fp, with F p kept up to date."""

    def __init__(self, linear: np.ndarray, matrix: np.ndarray) -> None:
        scale = power_of_two(max(np.abs(matrix).max(initial=0.0), np.abs(linear).max(initial=0.0)))
        self.double = np.ascontiguousarray(matrix * (2 / scale))
        self.diagonal = np.diagonal(self.double).copy()
        self.single = linear / scale + self.diagonal / 2
        self.start(np.zeros(len(linear), dtype=bool))

    def start(self, pruned: np.ndarray) -> None:
        self.pruned = pruned.copy()
        # A sum of rows in index order: the same on any number of threads, unlike a BLAS product.
        self.add = self.single + self.double[pruned].sum(axis=0)
        self._since_refresh = 0

    def flip(self, expert: int) -> None:
        if self.pruned[expert]:
            self.add -= self.double[expert]
        else:
            self.add += self.double[expert]
        self.pruned[expert] = not self.pruned[expert]
        self._since_refresh += 1
        if self._since_refresh >= REFRESH:
            self.start(self.pruned)

    def flip_costs(self) -> np.ndarray:
        return np.where(self.pruned, self.diagonal - self.add, self.add)

    def swap_costs(self, out: np.ndarray, into: np.ndarray) -> np.ndarray:
        costs = self.double.take(out, axis=0).take(into, axis=1)  # three times as fast as one two-dimensional index
        np.subtract(self.add[into][None, :], costs, out=costs)
        costs -= (self.add[out] - self.diagonal[out])[:, None]
        return costs

    def value(self, pruned: np.ndarray) -> float:
        """Cost of any set, in scaled units."""
        alone = self.single[pruned] - self.diagonal[pruned] / 2
        return float(alone.sum() + self.double[np.ix_(pruned, pruned)].sum() / 2)


class GeneralMoves:
    """Moves on any objective, by asking it."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.start(np.zeros(objective.size, dtype=bool))

    def start(self, pruned: np.ndarray) -> None:
        self.pruned = pruned.copy()

    def flip(self, expert: int) -> None:
        self.pruned[expert] = not self.pruned[expert]

    def flip_costs(self) -> np.ndarray:
        return self.objective.marginal_costs(self.pruned)

    def swap_costs(self, out: np.ndarray, into: np.ndarray) -> np.ndarray:
        whole = self.objective.swap_costs(self.pruned)
        rows = np.searchsorted(np.flatnonzero(self.pruned), out)
        columns = np.searchsorted(np.flatnonzero(~self.pruned), into)
        return whole[np.ix_(rows, columns)]

    def value(self, pruned: np.ndarray) -> float:
        return self.objective.cost(pruned)


def moves_of(objective: Objective) -> Moves:
    """The fast moves where the objective is quadratic, the general ones elsewhere."""
    if objective.linear is None:
        return GeneralMoves(objective)
    matrix = objective.quadratic
    return QuadraticMoves(objective.linear, np.zeros((objective.size, objective.size)) if matrix is None else matrix)


def power_of_two(value: float) -> float:
    """The power of two just above a positive value, 1 for 0: dividing by it is exact."""
    return math.ldexp(1.0, math.frexp(value)[1]) if value > 0 else 1.0


def greedy_forward(moves: Moves, problem: Problem, *, start: np.ndarray | None = None) -> np.ndarray:
    """Start with no expert pruned (or with `start`) and prune the cheapest one until every group has its quota.

    With side constraints it may end early, with a set that is not feasible.
    """
    moves.start(np.zeros(problem.size, dtype=bool) if start is None else start)
    left = problem.quota - np.bincount(problem.group[moves.pruned], minlength=len(problem.quota))
    while left.any():
        costs = np.where(moves.pruned | (left[problem.group] == 0), np.inf, moves.flip_costs())
        if problem.side is not None:
            fits = (problem.side.weights <= problem.side.slack(moves.pruned)[:, None]).all(axis=0)
            costs[~fits] = np.inf
        expert = int(costs.argmin())
        if costs[expert] == np.inf:
            break
        moves.flip(expert)
        left[problem.group[expert]] -= 1
    return moves.pruned.copy()


def greedy_backward(moves: Moves, problem: Problem) -> np.ndarray:
    """Start with every expert pruned and give the dearest one back until every group has its quota."""
    moves.start(np.ones(problem.size, dtype=bool))
    surplus = np.bincount(problem.group, minlength=len(problem.quota)) - problem.quota
    while surplus.any():
        costs = np.where(moves.pruned & (surplus[problem.group] > 0), moves.flip_costs(), np.inf)
        # Ties: the highest id comes back, so that the lowest ids stay pruned.
        expert = len(costs) - 1 - int(costs[::-1].argmin())
        moves.flip(expert)
        surplus[problem.group[expert]] -= 1
    return moves.pruned.copy()


def descend(moves: Moves, problem: Problem, start: np.ndarray) -> np.ndarray:
    """A set that is 1-swap optimal: the best exchange is taken, again and again, until none lowers the cost.

    First comes a phase that chooses the two experts of an exchange one after the other, which is far cheaper a step.
    """
    moves.start(start)
    members = problem.members()
    if problem.side is None:
        _descend_one_by_one(moves, members)
    for _ in range(100 * problem.size):  # far above any count seen; rounding noise cannot make it cycle for ever
        best = best_swap(moves, problem, members)
        if best is None or best[2] >= -noise(moves):
            break
        moves.flip(best[0])
        moves.flip(best[1])
    return moves.pruned.copy()


def _descend_one_by_one(moves: Moves, members: list[np.ndarray]) -> None:
    """Give the dearest expert of a group back, then prune the cheapest one there, while that lowers the cost."""
    improved = True
    while improved:
        improved = False
        for ids in members:
            while _exchange_one_by_one(moves, ids):
                improved = True


def _exchange_one_by_one(moves: Moves, ids: np.ndarray) -> bool:
    """Whether an exchange within the group was made; the set is as before where none pays."""
    pruned = ids[moves.pruned[ids]]
    if not 0 < len(pruned) < len(ids):
        return False
    costs = moves.flip_costs()
    least_gain = noise(moves)
    out = int(pruned[costs[pruned].argmin()])
    saved = float(costs[out])
    moves.flip(out)
    kept = ids[~moves.pruned[ids]]
    costs = moves.flip_costs()
    into = int(kept[costs[kept].argmin()])
    if saved + float(costs[into]) >= -least_gain:
        moves.flip(out)
        return False
    moves.flip(into)
    return True


def best_swap(moves: Moves, problem: Problem, members: list[np.ndarray]) -> tuple[int, int, float] | None:
    """(expert to give back, expert to prune, change of the cost) of the best allowed exchange, or None."""
    best: tuple[int, int, float] | None = None
    for out, into, costs in swap_blocks(moves, problem, members):
        row, column = divmod(int(costs.argmin()), len(into))
        if costs[row, column] < (np.inf if best is None else best[2]):
            best = int(out[row]), int(into[column]), float(costs[row, column])
    return best


def swap_blocks(
    moves: Moves, problem: Problem, members: list[np.ndarray]
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Per group: pruned ids, kept ids and the cost of every exchange (pruned, kept), infinite where not allowed."""
    blocks = []
    for ids in members:
        pruned = moves.pruned[ids]
        out, into = ids[pruned], ids[~pruned]
        if not len(out) or not len(into):
            continue
        costs = moves.swap_costs(out, into)
        if problem.side is not None:
            weights, slack = problem.side.weights, problem.side.slack(moves.pruned)
            change = weights[:, None, into] - weights[:, out, None]
            costs = np.where((change <= slack[:, None, None]).all(axis=0), costs, np.inf)
        blocks.append((out, into, costs))
    return blocks


def noise(moves: Moves) -> float:
    """Changes smaller than this are rounding."""
    return 1e-13 * float(np.abs(moves.flip_costs()).max(initial=0.0))


def settle_ties(moves: Moves, problem: Problem, start: np.ndarray) -> tuple[np.ndarray, tuple[tuple[int, int], ...]]:
    """The set after every free exchange towards lower ids, and the (pruned, kept) exchanges that still cost nothing."""
    moves.start(start)
    members = problem.members()
    tolerance = TIE * float(np.abs(moves.flip_costs()).max(initial=0.0))
    for _ in range(problem.size**2):  # every exchange lowers the sum of the pruned ids
        exchange = _first_tie_downwards(moves, problem, members, tolerance)
        if exchange is None:
            break
        moves.flip(exchange[0])
        moves.flip(exchange[1])
    ties = []
    for out, into, costs in swap_blocks(moves, problem, members):
        ties += [(int(out[row]), int(into[column])) for row, column in np.argwhere(np.abs(costs) <= tolerance)]
    return moves.pruned.copy(), tuple(sorted(ties))


def _first_tie_downwards(
    moves: Moves, problem: Problem, members: list[np.ndarray], tolerance: float
) -> tuple[int, int] | None:
    for out, into, costs in swap_blocks(moves, problem, members):
        exchanges = np.argwhere((np.abs(costs) <= tolerance) & (into[None, :] < out[:, None]))
        if len(exchanges):
            row, column = exchanges[0]
            return int(out[row]), int(into[column])
    return None
