"""Bounds are never above brute force, and statuses are earned."""

import numpy as np
import pytest

from moeprune.selection.objective import Quadratic, problem
from moeprune.selection.solvers import certificate, enumeration, relaxation
from moeprune.selection.solvers.certificate import certified, lower_bound
from moeprune.selection.solvers.relaxation import ConvexProgram
from moeprune.selection.solvers.table import Greedy, Swap
from tests.selection.cases import KINDS, brute_force, random_problem


@pytest.mark.parametrize("instances", [70, pytest.param(500, marks=pytest.mark.slow)])
def test_bounds_are_never_above_brute_force(instances: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enumeration, "ENUMERATE", 0)
    source = np.random.default_rng(2)
    tight = 0
    for number in range(instances):
        case = random_problem(KINDS[number % len(KINDS)], int(source.integers(4, 11)), source)
        best = brute_force(case)
        bound = lower_bound(case, Swap().solve(case).pruned)
        assert bound is not None
        assert bound.value <= best + 1e-9 * (1 + abs(best)), (number, bound)
        matrix, linear = case.objective.quadratic, case.objective.linear
        cheap = relaxation.row_bound(ConvexProgram(matrix, linear, case.group, case.quota))
        assert cheap <= best + 1e-9 * (1 + abs(best))
        tight += bound.value >= best - 0.05 * abs(best) - 1e-6
    assert tight > instances / 2  # the bound is worth having


def test_a_proposal_that_is_not_convex_is_repaired() -> None:
    matrix = np.array([[0.0, -1.0], [-1.0, 0.0]])
    program = relaxation.repaired(ConvexProgram(matrix, np.zeros(2), np.zeros(2, dtype=int), np.array([1])))
    assert np.linalg.eigvalsh(program.matrix)[0] >= 0
    for pruned in (np.array([1.0, 0.0]), np.array([0.0, 1.0])):
        assert pruned @ program.matrix @ pruned + program.linear @ pruned == pytest.approx(0.0)


def test_statuses_are_earned(monkeypatch: pytest.MonkeyPatch) -> None:
    source = np.random.default_rng(5)
    small = random_problem("norms", 10, source)
    assert certified(small, Swap().solve(small))[0].status == "proved_optimal"  # all sets were looked at
    worse = Greedy().solve(random_problem("indefinite", 30, source))
    assert worse.status == "local_optimum"
    matrix = source.random((40, 40))
    case = problem(Quadratic(matrix + matrix.T), 20)
    assert certified(case, Swap().solve(case))[0].status == "proved_optimal"  # a short branch and bound gets there
    monkeypatch.setattr(certificate, "NODE_EXPERTS", 0)
    solution, _ = certified(case, Swap().solve(case))
    assert solution.status == "certified_gap"
    assert solution.bound < solution.cost
    assert solution.bound > 0.95 * solution.cost


def test_too_many_experts_get_the_cheap_bound_and_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaxation, "SEMIDEFINITE_LIMIT", 30)
    matrix = np.random.default_rng(0).random((40, 40))
    case = problem(Quadratic(matrix + matrix.T), 20)
    solution, warnings = certified(case, Swap().solve(case))
    assert "cheap" in warnings[0]
    assert 0 < solution.bound < solution.cost
