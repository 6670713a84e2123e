"""Convex reformulations with the same costs on every feasible set, and the safe bounds they give.

On feasible 0/1 points, for any s (experts,), any U (experts, groups) and any N >= 0,

    l'p + p'Fp >= p'Mp + c'p,   M = F - N + diag(s) + (U G' + G U')/2,   c = l - s - U quota

because p_i^2 = p_i, G'p = quota and p'Np >= 0 (G is the group indicator). When M is positive semidefinite the right
side is convex, and its tangent at any point y bounds it from below over all sets by

    -y'My + sum over groups of the quota[g] smallest entries of 2My + c.

The semidefinite program (cvxpy, SCS) only proposes s, U and N; M's smallest eigenvalue then repairs s, and the tangent
is evaluated in plain arithmetic. So the bound holds however accurately SCS ended. (The relaxation is the one of
Billionnet, Elloumi and Plateau's quadratic convex reformulation; with N it is the doubly nonnegative one.)
"""

from dataclasses import dataclass
from warnings import catch_warnings, simplefilter

import numpy as np

from moeprune.selection.problem import Problem
from moeprune.selection.relaxation import ConvexProgram, scaled_program, shifted

SEMIDEFINITE_LIMIT = 320  # experts; beyond, the program takes minutes
NONNEGATIVE_LIMIT = 128  # experts; N adds a variable for every pair
CHEAP = "the bound is the cheap one"


@dataclass(frozen=True)
class Reformulation:
    """A convex program below the problem's costs on every set, both divided by `scale`."""

    program: ConvexProgram
    scale: float
    semidefinite: bool  # False: a uniform shift of the diagonal, a weak but cheap reformulation


def reformulation(problem: Problem, warnings: list[str]) -> Reformulation:
    """The tightest reformulation this module has; a warning says when it is the weak one."""
    scaled, scale = scaled_program(problem)
    program = _proposal(scaled, warnings)
    if program is None:
        return Reformulation(repaired(shifted(problem)), scale, semidefinite=False)
    return Reformulation(program, scale, semidefinite=True)


def row_bound(program: ConvexProgram) -> float:
    """A cheap bound for F of any sign: every pruned expert pays its own cost and at least its cheapest partners."""
    rows = np.diagonal(program.matrix) + program.linear
    masked = program.matrix.copy()
    np.fill_diagonal(masked, np.inf)
    for index, count in enumerate(program.quota):
        part = np.sort(masked[:, program.group == index], axis=1)
        # An expert of the group itself has one partner fewer there.
        partners = np.where(program.group == index, count - 1, count)
        sums = np.concatenate([np.zeros((len(part), 1)), np.cumsum(part, axis=1)], axis=1)
        rows = rows + sums[np.arange(len(part)), np.maximum(partners, 0)]
    return cheapest(rows, program.group, program.quota)


def rounding(program: ConvexProgram, point: np.ndarray) -> float:
    """More than what rounding can add to a tangent's bound at this point."""
    return 4e-16 * len(point) * float((np.abs(program.matrix) @ point + np.abs(program.linear)).sum())


def cheapest(costs: np.ndarray, group: np.ndarray, quota: np.ndarray) -> float:
    """Sum over groups of the quota[g] smallest costs: the exact minimum of a linear cost."""
    return float(sum(np.sort(costs[group == index])[:count].sum() for index, count in enumerate(quota)))


def repaired(program: ConvexProgram) -> ConvexProgram:
    """The same costs on 0/1 points with the diagonal raised until M is positive semidefinite beyond rounding."""
    lowest = float(np.linalg.eigvalsh(program.matrix)[0])
    slack = 1e-15 * len(program.linear) * max(1.0, float(np.abs(program.matrix).sum(axis=1).max()))
    shift = max(0.0, slack - lowest)
    return ConvexProgram(
        program.matrix + shift * np.eye(len(program.linear)), program.linear - shift, program.group, program.quota
    )


def _proposal(scaled: ConvexProgram, warnings: list[str]) -> ConvexProgram | None:
    """The convex program whose minimum is the semidefinite bound, or None (with a warning) for the cheap bound."""
    size = len(scaled.linear)
    if size > SEMIDEFINITE_LIMIT:
        warnings.append(
            f"{size} free experts are more than the semidefinite bound takes ({SEMIDEFINITE_LIMIT}); {CHEAP}"
        )
        return None
    pairs = scaled.matrix[~np.eye(size, dtype=bool)]
    helpful = np.mean(pairs == 0) > 0.3 or 4 * scaled.quota.sum() <= size
    return semidefinite(scaled, nonnegative=bool(helpful) and size <= NONNEGATIVE_LIMIT, warnings=warnings)


def semidefinite(scaled: ConvexProgram, *, nonnegative: bool, warnings: list[str]) -> ConvexProgram | None:
    """The reformulation proposed by the dual semidefinite program, repaired; None (with a warning) when SCS fails."""
    import cvxpy as cp

    size, groups = len(scaled.linear), len(scaled.quota)
    quota = scaled.quota.astype(float)
    indicator = np.zeros((size, groups))
    indicator[np.arange(size), scaled.group] = 1.0
    s, u = cp.Variable(size), cp.Variable((size, groups))
    multiplier, value = cp.Variable(groups), cp.Variable()
    matrix = scaled.matrix + cp.diag(s) + (u @ indicator.T + indicator @ u.T) / 2
    constraints = []
    if nonnegative:
        pairs = cp.Variable((size, size), symmetric=True)
        constraints.append(pairs >= 0)
        matrix = matrix - pairs
    linear = scaled.linear - s - u @ quota + indicator @ multiplier
    half = cp.reshape(linear / 2, (size, 1), order="C")
    lifted = cp.bmat([[matrix, half], [half.T, cp.reshape(-value, (1, 1), order="C")]])
    constraints.append(lifted >> 0)
    program = cp.Problem(cp.Maximize(value - quota @ multiplier), constraints)
    try:
        with catch_warnings():
            simplefilter("ignore")  # cvxpy warns of inaccurate ends; the repair makes them safe
            program.solve(solver=cp.SCS, eps=1e-5, max_iters=5000 if size <= 128 else 2000)
    except cp.SolverError as error:
        warnings.append(f"SCS failed ({error}); {CHEAP}")
        return None
    if any(v.value is None or not np.isfinite(v.value).all() for v in program.variables()):
        warnings.append(f"SCS ended with status {program.status!r} and no point; {CHEAP}")
        return None
    shift, mixing = np.asarray(s.value), np.asarray(u.value)
    mixed = mixing @ indicator.T
    proposal = scaled.matrix + np.diag(shift) + (mixed + mixed.T) / 2
    if nonnegative:
        dropped = np.maximum(np.asarray(pairs.value), 0.0)
        proposal = proposal - (dropped + dropped.T) / 2
    return repaired(ConvexProgram(proposal, scaled.linear - shift - mixing @ quota, scaled.group, scaled.quota))
