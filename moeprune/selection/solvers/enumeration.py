"""Every feasible set of a small problem."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, islice

import numpy as np

from moeprune.selection.objective import Objective, Problem, WorstOf

ENUMERATE = 20_000  # sets that the swap solver and the certificate simply all look at: hundredths of a second
CHUNK = 20_000
SLOW = 50  # an objective without matrices costs about this much more a set


def number_of_sets(problem: Problem) -> int:
    """Sets with the right counts; side constraints may forbid some of them."""
    return math.prod(math.comb(len(ids), int(count)) for ids, count in zip(problem.members(), problem.quota))


def few_sets(problem: Problem, limit: int) -> bool:
    """Whether looking at every set costs no more than looking at `limit` sets of a quadratic objective."""
    return number_of_sets(problem) * (SLOW if is_slow(problem.objective) else 1) <= limit


def is_slow(objective: Objective) -> bool:
    """Whether a cost is computed by more than a look at matrices."""
    return objective.linear is None and not isinstance(objective, WorstOf)


def cheapest_set(problem: Problem) -> np.ndarray | None:
    """The cheapest feasible set (experts,) bool, the first in order of ids among equals; None if there is none."""
    best_value, best = np.inf, None
    choices = _choices(problem.members(), problem.quota)
    while chunk := list(islice(choices, CHUNK)):
        sets = np.zeros((len(chunk), problem.size), dtype=bool)
        sets[np.arange(len(chunk))[:, None], np.array(chunk, dtype=int)] = True
        if problem.side is not None:
            sets = sets[(sets @ problem.side.weights.T <= problem.side.capacity).all(axis=1)]
            if not len(sets):
                continue
        values = _costs(problem, sets)
        # Costs equal up to rounding count as equal, so that the order of ids decides.
        index = int(np.flatnonzero(values <= values.min() + 1e-12 * np.abs(values).max())[0])
        if values[index] < best_value - 1e-12 * abs(values[index]):
            best_value, best = float(values[index]), sets[index]
    return best


def _costs(problem: Problem, sets: np.ndarray) -> np.ndarray:
    objective = problem.objective
    points = sets.astype(float)
    if isinstance(objective, WorstOf):
        parts = [_costs(replace(problem, objective=part), sets) for part in objective.parts]
        return np.max(np.array(parts) + np.array(objective.constants or 0.0).reshape(-1, 1), axis=0)
    if objective.linear is None:
        return np.array([objective.cost(one) for one in sets])
    costs = points @ objective.linear
    if objective.quadratic is not None:
        costs = costs + ((points @ objective.quadratic) * points).sum(axis=1)
    return costs


def _choices(members: list[np.ndarray], quota: np.ndarray) -> Iterator[tuple[int, ...]]:
    if not members:
        yield ()
        return
    for head in combinations(members[0].tolist(), int(quota[0])):
        for tail in _choices(members[1:], quota[1:]):
            yield head + tail
