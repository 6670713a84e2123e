"""Routing mass that must stay, and whether any set satisfies the count and all constraints."""

from collections.abc import Mapping

import numpy as np

from moeprune.artifacts.errors import InputError
from moeprune.selection.criteria.criterion import LayerEvidence
from moeprune.selection.objective import Problem, SideConstraints


def kept_mass(evidence: LayerEvidence, shares: Mapping[str, float]) -> SideConstraints | None:
    """Per domain: pruned experts may hold at most (1 - share) of all routed tokens; None for no shares."""
    if not shares:
        return None
    weights = np.array([np.asarray(evidence.domains[domain].count, dtype=np.float64) for domain in shares])
    capacity = np.array([(1 - share) for share in shares.values()]) * weights.sum(axis=1)
    names = tuple(f"keep_at_least.{domain}={share}" for domain, share in shares.items())
    # A hair of room, so that a share that is met exactly is not lost to rounding.
    return SideConstraints(weights, capacity * (1 + 1e-12), names)


def cheapest_feasible(problem: Problem, costs: np.ndarray) -> np.ndarray | None:
    """The feasible set (experts,) bool with the lowest sum of costs, or None when no set is feasible.

    An integer program (HiGHS through scipy). Raises InputError when HiGHS does not end with either answer.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    indicator = (problem.group[None, :] == np.arange(len(problem.quota))[:, None]).astype(float)
    constraints = [LinearConstraint(indicator, problem.quota, problem.quota)]
    if problem.side is not None:
        # Unit capacities keep HiGHS's absolute tolerance far below one token.
        scale = np.maximum(problem.side.weights.max(axis=1, initial=0.0), 1.0)
        limit = problem.side.capacity / scale
        constraints.append(LinearConstraint(problem.side.weights / scale[:, None], -np.inf, limit - 1e-9 * limit))
    result = milp(
        costs / max(np.abs(costs).max(initial=0.0), 1e-300),
        constraints=constraints,
        integrality=np.ones(problem.size),
        bounds=Bounds(0, 1),
        options={"time_limit": 60.0, "mip_rel_gap": 0.0},
    )
    if result.status == 2:
        return None
    if result.status != 0 or result.x is None:
        raise InputError(
            f"the constraints on {problem.size} experts could not be resolved: HiGHS says {result.message}"
        )
    pruned = result.x > 0.5
    return pruned if problem.feasible(pruned) else None


def require_feasible(problem: Problem, name: str) -> None:
    """Raises InputError that names the clashing constraints when no set satisfies all of them.

    The experts that must stay are already out of the problem; its free experts are what may go.
    """
    if int(problem.quota.sum()) > problem.size or any(
        count > len(ids) for ids, count in zip(problem.members(), problem.quota)
    ):
        raise InputError(
            f"{name}: selection.budget.prune asks for {int(problem.quota.sum())} more experts but only {problem.size} "
            "may go beside must_keep and the super-experts; prune less or protect fewer"
        )
    if problem.side is None or cheapest_feasible(problem, np.zeros(problem.size)) is not None:
        return
    side = problem.side
    alone = [
        side.names[row]
        for row in range(len(side.names))
        if cheapest_feasible(_with_side(problem, [row]), np.zeros(problem.size)) is None
    ]
    clashing = " and ".join(alone or side.names)
    raise InputError(
        f"{name}: selection.budget.prune (removes {int(problem.quota.sum())} of {problem.size} experts that may go) "
        f"clashes with selection.budget.{clashing}; prune less or lower the share"
    )


def _with_side(problem: Problem, rows: list[int]) -> Problem:
    assert problem.side is not None
    side = problem.side
    chosen = SideConstraints(side.weights[rows], side.capacity[rows], tuple(side.names[row] for row in rows))
    return Problem(problem.objective, problem.group, problem.quota, chosen)
