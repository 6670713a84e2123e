"""A selection problem over free experts, and its solution."""

from dataclasses import dataclass

import numpy as np

from moeprune.artifacts.plan import Status
from moeprune.selection.objective import Objective


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
