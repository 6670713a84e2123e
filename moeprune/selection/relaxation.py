"""The convex relaxation of a quadratic selection problem, solved with OSQP.

On 0/1 points p_i^2 = p_i, so F + diag(s) with linear term l - s has the same costs; with s large enough it is convex.
"""

from dataclasses import dataclass

import numpy as np

from moeprune.selection.problem import Problem
from moeprune.selection.search import power_of_two


@dataclass(frozen=True)
class ConvexProgram:
    """min x'Mx + c'x over 0 <= x <= 1 with quota[g] units in group g."""

    matrix: np.ndarray  # (experts, experts), symmetric; convex where the maker says so
    linear: np.ndarray  # (experts,)
    group: np.ndarray  # (experts,)
    quota: np.ndarray  # (groups,)


class RelaxationFailed(RuntimeError):
    """OSQP ended without a solution; the message holds its status."""


def scaled_program(problem: Problem) -> tuple[ConvexProgram, float]:
    """The problem's costs divided by a power of two, so that no entry is above 1, and that power; not yet convex."""
    linear, matrix = problem.objective.linear, problem.objective.quadratic
    assert linear is not None
    assert matrix is not None
    scale = power_of_two(max(np.abs(matrix).max(initial=0.0), np.abs(linear).max(initial=0.0)))
    return ConvexProgram(matrix / scale, linear / scale, problem.group, problem.quota), scale


def shifted(problem: Problem) -> ConvexProgram:
    """The relaxation with the smallest uniform shift that makes it convex, scaled to entries of at most 1."""
    scaled, _ = scaled_program(problem)
    lowest = float(np.linalg.eigvalsh(scaled.matrix)[0])
    # Rounded up to 1/1024: the last bits of an eigenvalue may depend on the number of threads, the relaxation must not.
    shift = max(0.0, np.ceil((1e-6 - lowest) * 1024) / 1024)
    size = problem.size
    return ConvexProgram(scaled.matrix + shift * np.eye(size), scaled.linear - shift, problem.group, problem.quota)


class OsqpProgram:
    """A convex program set up in OSQP once, solved for changing bounds on the experts."""

    def __init__(self, program: ConvexProgram, *, max_iterations: int, accuracy: float) -> None:
        import osqp
        from scipy import sparse

        self.size, self.quota = len(program.group), program.quota.astype(float)
        self._errors = (osqp.OSQPException, ValueError)
        rows = sparse.csc_matrix(
            (np.ones(self.size), (program.group, np.arange(self.size))), shape=(len(program.quota), self.size)
        )
        self._solver = osqp.OSQP()
        self._solver.setup(
            sparse.csc_matrix(np.triu(2 * program.matrix)),  # OSQP wants the upper triangle, of x'Px/2
            program.linear,
            sparse.vstack([rows, sparse.identity(self.size)], format="csc"),
            np.concatenate([self.quota, np.zeros(self.size)]),
            np.concatenate([self.quota, np.ones(self.size)]),
            verbose=False,
            eps_abs=accuracy,
            eps_rel=accuracy,
            max_iter=max_iterations,
        )

    def between(self, lower: np.ndarray, upper: np.ndarray) -> None:
        """Bounds (experts,) for the next solve."""
        self._solver.update(l=np.concatenate([self.quota, lower]), u=np.concatenate([self.quota, upper]))

    def solve(self) -> np.ndarray:
        """The relaxed set (experts,) in [0, 1]. Raises RelaxationFailed when OSQP does not report `solved`."""
        try:
            result = self._solver.solve(raise_error=True)
        except self._errors as error:
            raise RelaxationFailed(f"OSQP ended with {error!r} on {self.size} experts") from error
        if result.info.status != "solved" or not np.isfinite(result.x).all():
            raise RelaxationFailed(f"OSQP ended with status {result.info.status!r} on {self.size} experts")
        return np.clip(result.x, 0.0, 1.0)


def solve_convex(program: ConvexProgram, *, max_iterations: int = 4000, accuracy: float = 1e-4) -> np.ndarray:
    """The relaxed set (experts,) in [0, 1]. Raises RelaxationFailed when OSQP does not report `solved`."""
    return OsqpProgram(program, max_iterations=max_iterations, accuracy=accuracy).solve()


class NodeRelaxation:
    """The convex program under fixed experts, for branch and bound: a point always, OSQP's or the last good one."""

    def __init__(self, program: ConvexProgram) -> None:
        self._program = OsqpProgram(program, max_iterations=4000, accuracy=1e-5)
        self._last = (program.quota / np.bincount(program.group, minlength=len(program.quota)))[program.group]
        self.failures = 0

    def solve(self, state: np.ndarray) -> np.ndarray:
        """A point (experts,) for the state (experts,): -1 free, 0 kept, 1 pruned."""
        self._program.between((state == 1).astype(float), (state != 0).astype(float))
        try:
            self._last = self._program.solve()
        except RelaxationFailed:
            self.failures += 1  # any point gives a safe bound; the caller says how often this happened
        return self._last


def round_to_quota(relaxed: np.ndarray, problem: Problem) -> np.ndarray:
    """The set (experts,) bool of the largest entries in every group; ties go to the lowest id."""
    pruned = np.zeros(problem.size, dtype=bool)
    for ids, count in zip(problem.members(), problem.quota):
        # Six decimals are more than OSQP's accuracy; what differs beyond them is a tie.
        order = np.argsort(-np.round(relaxed[ids], 6), kind="stable")
        pruned[ids[order[:count]]] = True
    return pruned
