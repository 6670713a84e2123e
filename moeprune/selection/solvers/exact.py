"""The exact solver: every set up to twenty experts, beyond them branch and bound on convex programs (`relaxation`)."""

import heapq
import time
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from pydantic import Field

from moeprune.artifacts.errors import InputError
from moeprune.selection.objective import Problem, Solution
from moeprune.selection.solvers.enumeration import few_sets
from moeprune.selection.solvers.relaxation import NodeRelaxation, Reformulation, reformulation, rounding
from moeprune.selection.solvers.search import moves_of
from moeprune.selection.solvers.solver import enumerated, local_optimum
from moeprune.selection.solvers.swap import Swap

FREE, KEPT, PRUNED = -1, 0, 1
ENUMERATED_SETS = 200_000  # all of 10 of 20 experts


@dataclass(frozen=True)
class Proof:
    """The best set found, a bound below every set's cost, and how the search ended."""

    pruned: np.ndarray
    bound: float  # original unit
    finished: bool
    nodes: int
    warnings: tuple[str, ...]


@dataclass(order=True)
class _Node:
    bound: float
    order: int
    state: np.ndarray = field(compare=False)  # (experts,) FREE, KEPT or PRUNED


def prove(
    problem: Problem, incumbent: np.ndarray, convex: Reformulation, *, max_nodes: int, time_limit: float = np.inf
) -> Proof:
    """The optimum, or the best set and bound when the nodes or the seconds run out.

    Every node is bounded by the tangent at OSQP's point, which is safe however accurate the point is. A set
    cheaper by less than 1e-10 of the incumbent's cost does not replace it.
    """
    deadline = time.perf_counter() + time_limit
    warnings: list[str] = []
    search = _Search(problem, convex, incumbent)
    search.visit(_Node(-np.inf, 0, np.full(problem.size, FREE, dtype=np.int8)))
    while search.heap and search.nodes < max_nodes and time.perf_counter() < deadline:
        search.branch(heapq.heappop(search.heap))
    if search.relaxation.failures:
        warnings.append(
            f"OSQP did not solve {search.relaxation.failures} of {search.nodes} nodes; their bounds are weaker"
        )
    bound = min([search.limit, *(node.bound for node in search.heap)]) * convex.scale
    return Proof(search.best, bound, not search.heap, search.nodes, tuple(warnings))


class _Search:
    """The open nodes, in scaled units, and the best set so far."""

    def __init__(self, problem: Problem, convex: Reformulation, incumbent: np.ndarray) -> None:
        self.problem, self.program, self.scale = problem, convex.program, convex.scale
        self.relaxation = NodeRelaxation(convex.program)
        self.members = problem.members()
        self.heap: list[_Node] = []
        self.points: dict[int, np.ndarray] = {}
        self.nodes = 0
        self.best, self.limit = incumbent, np.inf
        self._accept(incumbent)

    def _accept(self, pruned: np.ndarray) -> None:
        """Takes a set as the new incumbent when it is cheaper."""
        cost = self.problem.objective.cost(pruned) / self.scale
        if cost < self.limit + 1e-10 * abs(cost):
            self.best, self.limit = pruned, cost - 1e-10 * abs(cost)

    def visit(self, node: _Node) -> None:
        """Bounds a node; keeps it open, closes it, or, when it is a single set, evaluates that set."""
        self.nodes += 1
        state = node.state
        if not self._complete(state):
            return
        if not (state == FREE).any():
            pruned = state == PRUNED
            if self.problem.feasible(pruned):
                self._accept(pruned)
            return
        point = self.relaxation.solve(state)
        bound, state = self._tightened(point, state)
        if bound >= self.limit:
            return
        order = self.nodes
        self.points[order] = point
        heapq.heappush(self.heap, _Node(max(bound, node.bound), order, state))

    def branch(self, node: _Node) -> None:
        """Opens the two children of a node, split at the free expert whose relaxed value is nearest to a half."""
        point = self.points.pop(node.order)
        if node.bound >= self.limit:
            return
        free = np.flatnonzero(node.state == FREE)
        if not len(free):
            self.visit(node)
            return
        expert = free[int(np.abs(point[free] - 0.5).argmin())]
        for value in (PRUNED, KEPT) if point[expert] > 0.5 else (KEPT, PRUNED):
            state = node.state.copy()
            state[expert] = value
            self.visit(_Node(node.bound, 0, state))

    def _complete(self, state: np.ndarray) -> bool:
        """Fills groups whose remaining experts must all go or all stay; False when a quota cannot be met."""
        for ids, count in zip(self.members, self.program.quota):
            left = int(count) - int((state[ids] == PRUNED).sum())
            free = ids[state[ids] == FREE]
            if not 0 <= left <= len(free):
                return False
            if left in (0, len(free)):
                state[free] = PRUNED if left else KEPT
        return True

    def _tightened(self, point: np.ndarray, state: np.ndarray) -> tuple[float, np.ndarray]:
        """The tangent's bound under the fixed experts, and the state with experts fixed that the bound decides."""
        program = self.program
        product = program.matrix @ point
        slope = 2 * product + program.linear
        bound = float(slope[state == PRUNED].sum() - point @ product) - rounding(program, point)
        cuts = []
        for ids, count in zip(self.members, program.quota):
            free = ids[state[ids] == FREE]
            left = int(count) - int((state[ids] == PRUNED).sum())
            ordered = np.sort(slope[free])
            bound += float(ordered[:left].sum())
            if 0 < left < len(free):
                cuts.append((free, ordered[left - 1], ordered[left]))
        room = self.limit - bound
        for free, last_in, first_out in cuts:
            state[free[slope[free] - last_in >= room]] = KEPT
            state[free[first_out - slope[free] >= room]] = PRUNED
        return bound, state


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
