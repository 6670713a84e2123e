"""The largest of several quadratic costs, minimised by weighing them.

For weights w that sum to 1, sum_d w_d f_d(p) <= max_d f_d(p): a quadratic problem whose minimum is a lower bound, and
whose minimiser is a good start. Multiplicative weights raise the weight of the largest cost in the next round.
"""

from dataclasses import dataclass

import numpy as np

from moeprune.selection.objective import Problem, Quadratic, WorstOf
from moeprune.selection.solvers.search import descend, greedy_backward, greedy_forward, moves_of

ROUNDS = 40
RATE = 2.0  # of the first round; later ones are smaller, so that the weights settle


@dataclass(frozen=True)
class Reweighted:
    """The sets of all rounds, and the weighted problem whose minimum (as far as searched) was highest."""

    sets: list[np.ndarray]
    problem: Problem
    constant: float  # what the weighted problem leaves out


def reweighted(problem: Problem, worst: WorstOf) -> Reweighted:
    """Sets and weights after a fixed number of rounds; deterministic."""
    weights = np.full(len(worst.parts), 1 / len(worst.parts))
    constants = np.array(worst.constants or np.zeros(len(worst.parts)))
    sets: list[np.ndarray] = []
    best_value, best = -np.inf, weights
    for turn in range(ROUNDS):
        pruned = _minimiser(_with(problem, worst.weighted(weights)))
        if not problem.feasible(pruned):
            break
        sets.append(pruned)
        costs = worst.costs(pruned)
        value = float(weights @ costs)
        if value > best_value:
            best_value, best = value, weights
        excess = costs / max(np.abs(costs).max(), 1e-300)
        weights = weights * np.exp(RATE / (1 + turn) ** 0.5 * (excess - excess.max()))
        weights = weights / weights.sum()
    return Reweighted(sets, _with(problem, worst.weighted(best)), float(best @ constants))


def _with(problem: Problem, objective: Quadratic) -> Problem:
    return Problem(objective, problem.group, problem.quota, problem.side)


def _minimiser(problem: Problem) -> np.ndarray:
    moves = moves_of(problem.objective)
    starts = [greedy_forward(moves, problem), greedy_backward(moves, problem)]
    ends = [descend(moves, problem, start) for start in starts if problem.feasible(start)]
    return min(ends, key=moves.value) if ends else starts[0]
