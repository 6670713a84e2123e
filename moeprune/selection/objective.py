"""What a selection minimises: the cost of pruning a set of experts together.

A set is a boolean array (experts,), True means PRUNE. Criteria build objectives, solvers minimise them, and neither
knows the other. `linear` and `quadratic` are there when the cost is sum(linear[set]) + p' quadratic p; relaxations and
bounds need them, searches do not. A problem is an objective over the free experts with its constraints.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from moeprune.artifacts.plan import Status


class Objective(Protocol):
    """Cost of a set of pruned experts, and what one flip or one exchange adds to it."""

    @property
    def size(self) -> int:
        """Number of experts."""
        ...

    @property
    def linear(self) -> np.ndarray | None:
        """Costs of single experts (experts,), or None where the cost has no such form."""
        ...

    @property
    def quadratic(self) -> np.ndarray | None:
        """Symmetric pair costs (experts, experts), or None where the cost has no such form."""
        ...

    def cost(self, pruned: np.ndarray) -> float: ...

    def marginal_costs(self, pruned: np.ndarray) -> np.ndarray:
        """Change of the cost (experts,) when one expert changes sides: is pruned, or is given back."""
        ...

    def swap_costs(self, pruned: np.ndarray) -> np.ndarray:
        """Change of the cost (pruned experts, kept experts) when one is given back and the other pruned instead."""
        ...


@dataclass(frozen=True)
class Modular:
    """The sum of the pruned experts' scores (experts,): every first-order criterion."""

    scores: np.ndarray
    quadratic: None = None

    @property
    def size(self) -> int:
        return len(self.scores)

    @property
    def linear(self) -> np.ndarray:
        return self.scores

    def cost(self, pruned: np.ndarray) -> float:
        return float(self.scores[pruned].sum())

    def marginal_costs(self, pruned: np.ndarray) -> np.ndarray:
        return np.where(pruned, -self.scores, self.scores)

    def swap_costs(self, pruned: np.ndarray) -> np.ndarray:
        return self.scores[~pruned][None, :] - self.scores[pruned][:, None]


@dataclass(frozen=True)
class Quadratic:
    """p' F p + l' p for a symmetric F (experts, experts) of any sign; l (experts,) is 0 when not given."""

    matrix: np.ndarray
    offset: np.ndarray | None = None

    @property
    def size(self) -> int:
        return len(self.matrix)

    @property
    def linear(self) -> np.ndarray:
        return np.zeros(self.size) if self.offset is None else self.offset

    @property
    def quadratic(self) -> np.ndarray:
        return self.matrix

    def cost(self, pruned: np.ndarray) -> float:
        return float(self.matrix[np.ix_(pruned, pruned)].sum() + self.linear[pruned].sum())

    def marginal_costs(self, pruned: np.ndarray) -> np.ndarray:
        add, give_back = self._flips(pruned)
        return np.where(pruned, -give_back, add)

    def swap_costs(self, pruned: np.ndarray) -> np.ndarray:
        add, give_back = self._flips(pruned)
        return add[~pruned][None, :] - give_back[pruned][:, None] - 2 * self.matrix[np.ix_(pruned, ~pruned)]

    def _flips(self, pruned: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # Column sums, not a BLAS product: their order does not depend on the number of threads.
        crossing = 2 * self.matrix[:, pruned].sum(axis=1) + self.linear
        diagonal = np.diagonal(self.matrix)
        return crossing + diagonal, crossing - diagonal


@dataclass(frozen=True)
class Combination:
    """A weighted sum of objectives over the same experts; quadratic where all its parts are modular or quadratic."""

    parts: Sequence[Objective]
    weights: Sequence[float]

    @property
    def size(self) -> int:
        return self.parts[0].size

    @property
    def linear(self) -> np.ndarray | None:
        if any(part.linear is None for part in self.parts):
            return None
        return np.sum([weight * part.linear for part, weight in zip(self.parts, self.weights)], axis=0)  # type: ignore[operator, arg-type]

    @property
    def quadratic(self) -> np.ndarray | None:
        matrices = [(part.quadratic, weight) for part, weight in zip(self.parts, self.weights) if not is_modular(part)]
        if not matrices or any(matrix is None for matrix, _ in matrices):
            return None
        return np.sum([weight * matrix for matrix, weight in matrices], axis=0)  # type: ignore[operator, arg-type]

    def cost(self, pruned: np.ndarray) -> float:
        return float(sum(weight * part.cost(pruned) for part, weight in zip(self.parts, self.weights)))

    def marginal_costs(self, pruned: np.ndarray) -> np.ndarray:
        return np.sum([weight * part.marginal_costs(pruned) for part, weight in zip(self.parts, self.weights)], axis=0)

    def swap_costs(self, pruned: np.ndarray) -> np.ndarray:
        return np.sum([weight * part.swap_costs(pruned) for part, weight in zip(self.parts, self.weights)], axis=0)


@dataclass(frozen=True)
class WorstOf:
    """The largest of several quadratic costs, each with a constant: what the worst-off of several parties pays."""

    parts: tuple[Quadratic, ...]
    constants: tuple[float, ...] = ()
    linear: None = None
    quadratic: None = None

    @property
    def size(self) -> int:
        return self.parts[0].size

    def costs(self, pruned: np.ndarray) -> np.ndarray:
        """What each party pays (parties,)."""
        return np.array([part.cost(pruned) for part in self.parts]) + (self.constants or 0.0)

    def cost(self, pruned: np.ndarray) -> float:
        return float(self.costs(pruned).max())

    def marginal_costs(self, pruned: np.ndarray) -> np.ndarray:
        now = self.costs(pruned)
        after = [cost + part.marginal_costs(pruned) for cost, part in zip(now, self.parts)]
        return np.max(after, axis=0) - now.max()

    def swap_costs(self, pruned: np.ndarray) -> np.ndarray:
        now = self.costs(pruned)
        after = [cost + part.swap_costs(pruned) for cost, part in zip(now, self.parts)]
        return np.max(after, axis=0) - now.max()

    def weighted(self, weights: np.ndarray) -> Quadratic:
        """The weighted sum of the parties' costs, less its constant; for weights that sum to 1 it is never above."""
        matrix = np.sum([weight * part.matrix for weight, part in zip(weights, self.parts)], axis=0)
        return Quadratic(matrix, np.sum([weight * part.linear for weight, part in zip(weights, self.parts)], axis=0))


@dataclass(frozen=True)
class Restricted:
    """The same cost as a function of the `free` experts alone; the experts in `fixed` are pruned in any case.

    Differs from the whole cost by a constant, cost(fixed).
    """

    whole: Objective
    free: np.ndarray  # (free experts,) ids
    fixed: np.ndarray  # (fixed experts,) ids
    linear: None = None
    quadratic: None = None

    @property
    def size(self) -> int:
        return len(self.free)

    def cost(self, pruned: np.ndarray) -> float:
        return self.whole.cost(self._widen(pruned)) - self.whole.cost(self._widen(np.zeros_like(pruned)))

    def marginal_costs(self, pruned: np.ndarray) -> np.ndarray:
        return self.whole.marginal_costs(self._widen(pruned))[self.free]

    def swap_costs(self, pruned: np.ndarray) -> np.ndarray:
        wide = self._widen(pruned)
        rows = np.isin(np.flatnonzero(wide), self.free)
        columns = np.isin(np.flatnonzero(~wide), self.free)
        return self.whole.swap_costs(wide)[np.ix_(rows, columns)]

    def _widen(self, pruned: np.ndarray) -> np.ndarray:
        wide = np.zeros(self.whole.size, dtype=bool)
        wide[self.fixed] = True
        wide[self.free] = pruned
        return wide


def is_modular(objective: Objective) -> bool:
    """True when the objective is a sum of scores; a quadratic one counts when its pairs cost nothing."""
    if objective.linear is None:
        return False
    matrix = objective.quadratic
    return matrix is None or not np.any(matrix - np.diag(np.diagonal(matrix)))


def restrict(objective: Objective, free: np.ndarray, fixed: np.ndarray) -> Objective:
    """`objective` as a function of the ids in `free` (ascending) when those in `fixed` are pruned, less a constant."""
    if isinstance(objective, WorstOf):
        pruned = np.isin(np.arange(objective.size), fixed)
        parts = [restrict(part, free, fixed) for part in objective.parts]
        return WorstOf(tuple(part for part in parts if isinstance(part, Quadratic)), tuple(objective.costs(pruned)))
    linear, matrix = objective.linear, objective.quadratic
    if linear is None:
        return Restricted(objective, free, fixed)
    if matrix is None:
        return Modular(linear[free])
    crossing = 2 * matrix[np.ix_(free, fixed)].sum(axis=1)
    return Quadratic(matrix[np.ix_(free, free)], linear[free] + crossing)


@dataclass(frozen=True)
class SideConstraints:
    """weights @ pruned <= capacity: what the pruned experts may carry together."""

    weights: np.ndarray  # (constraints, experts) float64, >= 0
    capacity: np.ndarray  # (constraints,)
    names: tuple[str, ...]

    def slack(self, pruned: np.ndarray) -> np.ndarray:
        """What is left of each capacity (constraints,); negative where the set breaks it."""
        return self.capacity - self.weights[:, pruned].sum(axis=1)


@dataclass(frozen=True)
class Problem:
    """Minimise the objective over sets that prune exactly quota[g] experts of every group g."""

    objective: Objective
    group: np.ndarray  # (experts,) int: the group each expert belongs to
    quota: np.ndarray  # (groups,) int: how many experts of each group go
    side: SideConstraints | None = None

    @property
    def size(self) -> int:
        return len(self.group)

    def members(self) -> list[np.ndarray]:
        """Ascending expert ids of every group."""
        return [np.flatnonzero(self.group == group) for group in range(len(self.quota))]

    def feasible(self, pruned: np.ndarray) -> bool:
        counts = np.bincount(self.group[pruned], minlength=len(self.quota))
        return bool(np.array_equal(counts, self.quota)) and (
            self.side is None or bool((self.side.slack(pruned) >= 0).all())
        )


@dataclass(frozen=True)
class Solution:
    """The chosen set, what is known about it, and what the user must hear."""

    pruned: np.ndarray  # (experts,) bool
    cost: float
    status: Status
    bound: float | None = None
    ties: tuple[tuple[int, int], ...] = ()  # (pruned, kept) pairs whose exchange costs nothing
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0


def problem(objective: Objective, prune: int) -> Problem:
    """The problem without groups: prune exactly that many experts."""
    return Problem(objective, np.zeros(objective.size, dtype=int), np.array([prune]))
