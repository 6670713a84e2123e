"""Safe lower bounds: no set within the budget costs less.

On feasible 0/1 points, for any s (experts,), any U (experts, groups) and any N >= 0,

    l'p + p'Fp >= p'Mp + c'p,   M = F - N + diag(s) + (U G' + G U')/2,   c = l - s - U quota

because p_i^2 = p_i, G'p = quota and p'Np >= 0 (G is the group indicator). When M is positive semidefinite the right
side is convex, and its tangent at any point y bounds it from below over all sets by

    -y'My + sum over groups of the quota[g] smallest entries of 2My + c.

The semidefinite program (cvxpy, SCS) only proposes s, U and N; M's smallest eigenvalue then repairs s, and the tangent
is evaluated in plain arithmetic. So the bound holds however accurately SCS ended. (The relaxation is the one of
Billionnet, Elloumi and Plateau's quadratic convex reformulation; with N it is the doubly nonnegative one.)
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from warnings import catch_warnings, simplefilter

import numpy as np

from moeprune.selection.problem import Problem
from moeprune.selection.relaxation import ConvexProgram, RelaxationFailed, solve_convex
from moeprune.selection.search import power_of_two

ENUMERATE = 20_000  # up to this many sets are simply all looked at
SEMIDEFINITE_LIMIT = 320  # experts; beyond, the program takes minutes
NONNEGATIVE_LIMIT = 128  # experts; N adds a variable for every pair
PROVED = 1e-9  # a relative gap below this is rounding: the set is optimal


@dataclass(frozen=True)
class Bound:
    """A lower bound in the objective's unit, and how it came about."""

    value: float
    method: str
    warnings: tuple[str, ...] = ()


def lower_bound(problem: Problem, *, incumbent: np.ndarray | None = None) -> Bound | None:
    """The best safe bound this module has for the problem, or None where the objective has no quadratic form.

    `incumbent`, a good set, is one of the points the tangent is tried at. Side constraints are left out, which keeps
    the bound safe.
    """
    linear, matrix = problem.objective.linear, problem.objective.quadratic
    if linear is None or matrix is None:
        return None
    if math.prod(math.comb(len(ids), int(count)) for ids, count in zip(problem.members(), problem.quota)) <= ENUMERATE:
        return Bound(_enumerated(problem), "all sets")
    scale = power_of_two(max(np.abs(matrix).max(), np.abs(linear).max()))
    scaled = ConvexProgram(matrix / scale, linear / scale, problem.group, problem.quota)
    warnings: list[str] = []
    cheap = row_bound(scaled)
    program = _proposal(scaled, warnings)
    if program is None:
        return Bound(cheap * scale, "cheap (sorted rows)", tuple(warnings))
    points = _minimiser(program, warnings)
    if incumbent is not None:
        if any(no_exchange_pays(program, point, incumbent) for point in points):
            return Bound(problem.objective.cost(incumbent), "semidefinite, every other set excluded", tuple(warnings))
        points.append(incumbent.astype(float))
    return Bound(
        max(cheap, *(tangent_bound(program, point) for point in points)) * scale, "semidefinite", tuple(warnings)
    )


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


def tangent_bound(program: ConvexProgram, point: np.ndarray) -> float:
    """The tangent's minimum over all sets, less what rounding may have added. Safe for positive semidefinite M."""
    product = program.matrix @ point
    slope = 2 * product + program.linear
    rounding = 4e-16 * len(point) * (np.abs(program.matrix) @ point + np.abs(program.linear)).sum()
    return float(cheapest(slope, program.group, program.quota) - point @ product - rounding)


def no_exchange_pays(program: ConvexProgram, point: np.ndarray, incumbent: np.ndarray) -> bool:
    """True when the tangent proves that no set costs less than `incumbent`, although the plain bound is below it.

    Another set prunes some kept expert or keeps some pruned one; the tangent's minimum under each such change is its
    plain minimum plus a difference of sorted slopes. When all of them reach the incumbent's cost, it is optimal.
    """
    slope = 2 * program.matrix @ point + program.linear
    base = tangent_bound(program, point)
    cost = incumbent @ program.matrix @ incumbent + program.linear @ incumbent
    rounding = 1e-13 * (incumbent @ np.abs(program.matrix) @ incumbent + np.abs(program.linear) @ incumbent)
    for index, count in enumerate(program.quota):
        ids = program.group == index
        ordered = np.sort(slope[ids])
        if count and len(ordered) > count:
            pruning = np.maximum(slope[ids & ~incumbent] - ordered[count - 1], 0.0).min()
            keeping = np.maximum(ordered[count] - slope[ids & incumbent], 0.0).min()
            if base + min(pruning, keeping) < cost + rounding:
                return False
    return True


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


def _minimiser(program: ConvexProgram, warnings: list[str]) -> list[np.ndarray]:
    """The point where the tangent is highest, as OSQP finds it."""
    try:
        return [solve_convex(program, max_iterations=20_000, accuracy=1e-7)]
    except RelaxationFailed as error:
        warnings.append(f"the bound is less tight than it could be: {error}")
        return []


def _proposal(scaled: ConvexProgram, warnings: list[str]) -> ConvexProgram | None:
    """The convex program whose minimum is the semidefinite bound, or None (with a warning) for the cheap bound."""
    size = len(scaled.linear)
    if size > SEMIDEFINITE_LIMIT:
        warnings.append(
            f"{size} free experts are more than the semidefinite bound takes ({SEMIDEFINITE_LIMIT}); "
            "the bound is the cheap one"
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
            program.solve(solver=cp.SCS, eps=1e-5, max_iters=5000)
    except cp.SolverError as error:
        warnings.append(f"SCS failed ({error}); the bound is the cheap one")
        return None
    if any(v.value is None or not np.isfinite(v.value).all() for v in program.variables()):
        warnings.append(f"SCS ended with status {program.status!r} and no point; the bound is the cheap one")
        return None
    shift, mixing = np.asarray(s.value), np.asarray(u.value)
    mixed = mixing @ indicator.T
    proposal = scaled.matrix + np.diag(shift) + (mixed + mixed.T) / 2
    if nonnegative:
        dropped = np.maximum(np.asarray(pairs.value), 0.0)
        proposal = proposal - (dropped + dropped.T) / 2
    return repaired(ConvexProgram(proposal, scaled.linear - shift - mixing @ quota, scaled.group, scaled.quota))


def _enumerated(problem: Problem) -> float:
    """The cheapest feasible cost, by looking at every set."""
    best = np.inf
    members = problem.members()
    for chosen in _choices(members, problem.quota):
        pruned = np.zeros(problem.size, dtype=bool)
        pruned[list(chosen)] = True
        best = min(best, problem.objective.cost(pruned))
    return best


def _choices(members: list[np.ndarray], quota: np.ndarray) -> Iterator[tuple[int, ...]]:
    if not len(members):
        yield ()
        return
    for head in combinations(members[0], int(quota[0])):
        for tail in _choices(members[1:], quota[1:]):
            yield head + tail
