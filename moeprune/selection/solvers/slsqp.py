"""The recipe of HOPE's authors: SLSQP on the relaxed problem, F as given, rounded. For comparison."""

import time
from typing import Literal

import numpy as np
from pydantic import Field

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.plan import Status
from moeprune.selection.objective import Problem, Solution
from moeprune.selection.solvers.relaxation import round_to_quota
from moeprune.selection.solvers.search import moves_of
from moeprune.selection.solvers.solver import Solver, greedy_ends


class _OutOfTime(RuntimeError):
    pass


class Slsqp(Solver):
    """SLSQP from equal shares, on F in its own unit, then the largest entries (arXiv:2609.18916).

    Its tolerance is absolute, so on an F of small numbers it stops where it started; that is said in a warning.
    """

    name: Literal["slsqp"] = "slsqp"
    max_iterations: int = Field(default=100, ge=1)
    time_limit: float | None = Field(default=None, gt=0)  # seconds; None does not look at the clock

    def search(self, problem: Problem) -> Solution:
        if problem.objective.quadratic is None:
            raise InputError("selection.solver: slsqp needs a quadratic criterion such as hope; use swap")
        start = (problem.quota / np.bincount(problem.group, minlength=len(problem.quota)))[problem.group]
        point, status, warnings = self._minimise(problem, start)
        if np.abs(point - start).max() < 1e-6:
            status = "time_limit" if status == "time_limit" else "not_converged"
            warnings.append("SLSQP did not move from its start: F is too small or its rows are alike; use swap")
        pruned = round_to_quota(point, problem)
        if not problem.feasible(pruned):
            warnings.append("the rounded point breaks a constraint; the greedy set is returned instead")
            pruned = greedy_ends(moves_of(problem.objective), problem)[0]
        return Solution(pruned, problem.objective.cost(pruned), status, warnings=tuple(warnings))

    def _minimise(self, problem: Problem, start: np.ndarray) -> tuple[np.ndarray, Status, list[str]]:
        from scipy.optimize import minimize

        matrix, linear = np.asarray(problem.objective.quadratic), np.asarray(problem.objective.linear)
        indicator = (problem.group[None, :] == np.arange(len(problem.quota))[:, None]).astype(float)
        last, deadline = [start], time.perf_counter() + (self.time_limit or np.inf)

        def cost(point: np.ndarray) -> tuple[float, np.ndarray]:
            if time.perf_counter() > deadline:
                raise _OutOfTime
            last[0] = point.copy()
            product = matrix @ point
            return float(point @ product + linear @ point), 2 * product + linear

        balance = {"type": "eq", "fun": lambda p: indicator @ p - problem.quota, "jac": lambda p: indicator}
        try:
            result = minimize(
                cost,
                start,
                jac=True,
                method="SLSQP",
                bounds=[(0.0, 1.0)] * problem.size,
                constraints=[balance],
                options={"maxiter": self.max_iterations},
            )
        except _OutOfTime:
            return last[0], "time_limit", [f"SLSQP was stopped after {self.time_limit} s"]
        if not result.success or not np.isfinite(result.x).all():
            point = result.x if np.isfinite(result.x).all() else start
            return point, "not_converged", [f"SLSQP did not converge: {result.message}"]
        return result.x, "local_optimum", []
