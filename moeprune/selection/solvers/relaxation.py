"""Convex programs with the same costs on every feasible set: solved with OSQP, and the safe bounds they give.

On 0/1 points p_i^2 = p_i, so F + diag(s) with linear term l - s has the same costs; with s large enough it is convex.
More generally, on feasible 0/1 points, for any s (experts,), any U (experts, groups) and any N >= 0,

    l'p + p'Fp >= p'Mp + c'p,   M = F - N + diag(s) + (U G' + G U')/2,   c = l - s - U quota

because G'p = quota and p'Np >= 0 (G is the group indicator). When M is positive semidefinite the right side is convex,
and its tangent at any point y bounds it from below over all sets by

    -y'My + sum over groups of the quota[g] smallest entries of 2My + c.

The semidefinite program (cvxpy, SCS) only proposes s, U and N; M's smallest eigenvalue then repairs s, and the tangent
is evaluated in plain arithmetic. So the bound holds whatever the accuracy of SCS. (The relaxation is the one of
Billionnet, Elloumi and Plateau's quadratic convex reformulation; with N it is the doubly nonnegative one.)
"""

from dataclasses import dataclass
from warnings import catch_warnings, simplefilter

import numpy as np

from moeprune.selection.objective import Problem
from moeprune.selection.solvers.search import power_of_two

SEMIDEFINITE_LIMIT = 320  # experts; beyond, the program takes minutes
NONNEGATIVE_LIMIT = 128  # experts; N adds a variable for every pair
CHEAP = "the bound is the cheap one"


@dataclass(frozen=True)
class ConvexProgram:
    """min x'Mx + c'x over 0 <= x <= 1 with quota[g] units in group g."""

    matrix: np.ndarray  # (experts, experts), symmetric; convex where the function that returns it says so
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
