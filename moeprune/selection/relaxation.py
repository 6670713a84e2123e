"""The convex relaxation of a quadratic selection problem, solved with OSQP.

On 0/1 points p_i^2 = p_i, so F + diag(s) with linear term l - s has the same costs; with s large enough it is convex.
"""

from dataclasses import dataclass

import numpy as np

from moeprune.selection.problem import Problem
from moeprune.selection.search import power_of_two


@dataclass(frozen=True)
class ConvexProgram:
    """min x'Mx + c'x over 0 <= x <= 1 with quota[g] units in group g; M is positive semidefinite."""

    matrix: np.ndarray  # (experts, experts)
    linear: np.ndarray  # (experts,)
    group: np.ndarray  # (experts,)
    quota: np.ndarray  # (groups,)


class RelaxationFailed(RuntimeError):
    """OSQP ended without a solution; the message holds its status."""


def shifted(problem: Problem) -> ConvexProgram:
    """The relaxation with the smallest uniform shift that makes it convex, scaled to entries of at most 1."""
    linear, matrix = problem.objective.linear, problem.objective.quadratic
    assert linear is not None
    assert matrix is not None
    scale = power_of_two(max(np.abs(matrix).max(initial=0.0), np.abs(linear).max(initial=0.0)))
    scaled = matrix / scale
    lowest = float(np.linalg.eigvalsh(scaled)[0])
    # Rounded up to 1/1024: the last bits of an eigenvalue may depend on the number of threads, the relaxation must not.
    shift = max(0.0, np.ceil((1e-6 - lowest) * 1024) / 1024)
    return ConvexProgram(scaled + shift * np.eye(len(scaled)), linear / scale - shift, problem.group, problem.quota)


def solve_convex(program: ConvexProgram, *, max_iterations: int = 4000, accuracy: float = 1e-4) -> np.ndarray:
    """The relaxed set x (experts,) in [0, 1]. Raises RelaxationFailed when OSQP does not report `solved`."""
    import osqp
    from scipy import sparse

    size, groups = len(program.group), len(program.quota)
    solver = osqp.OSQP()
    rows = sparse.csc_matrix((np.ones(size), (program.group, np.arange(size))), shape=(groups, size))
    constraints = sparse.vstack([rows, sparse.identity(size)], format="csc")
    quota = program.quota.astype(float)
    try:
        solver.setup(
            sparse.csc_matrix(np.triu(2 * program.matrix)),  # OSQP wants the upper triangle of x'Px/2
            program.linear,
            constraints,
            np.concatenate([quota, np.zeros(size)]),
            np.concatenate([quota, np.ones(size)]),
            verbose=False,
            eps_abs=accuracy,
            eps_rel=accuracy,
            max_iter=max_iterations,
        )
        result = solver.solve(raise_error=True)
    except (osqp.OSQPException, ValueError) as error:
        raise RelaxationFailed(f"OSQP ended with {error!r} on {size} experts") from error
    if result.info.status != "solved" or not np.isfinite(result.x).all():
        raise RelaxationFailed(f"OSQP ended with status {result.info.status!r} on {size} experts")
    return np.clip(result.x, 0.0, 1.0)


def round_to_quota(relaxed: np.ndarray, problem: Problem) -> np.ndarray:
    """The set (experts,) bool of the largest entries in every group; ties go to the lowest id."""
    pruned = np.zeros(problem.size, dtype=bool)
    for ids, count in zip(problem.members(), problem.quota):
        # Six decimals are more than OSQP's accuracy; what differs beyond them is a tie.
        order = np.argsort(-np.round(relaxed[ids], 6), kind="stable")
        pruned[ids[order[:count]]] = True
    return pruned
