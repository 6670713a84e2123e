"""Solvers against brute force, and that neither the unit of F nor the order of ties changes a set."""

import numpy as np
import pytest

from moeprune.selection.objective import Combination, Modular, Problem, Quadratic, Restricted, problem, restrict
from moeprune.selection.solvers import enumeration, exact, relaxation
from moeprune.selection.solvers import solver as solver_module
from moeprune.selection.solvers.relaxation import RelaxationFailed, shifted, solve_convex
from moeprune.selection.solvers.table import (
    SOLVERS,
    Exact,
    Greedy,
    Relaxed,
    Slsqp,
    Swap,
    Thorough,
)
from tests.selection.cases import KINDS, brute_force, random_problem

ROUNDING = 1e-9


@pytest.fixture
def search_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small problems are searched too, not enumerated."""
    monkeypatch.setattr(enumeration, "ENUMERATE", 0)


@pytest.mark.parametrize("look_at_all", [True, False])
def test_swap_equals_brute_force_on_200_instances(look_at_all: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not look_at_all:
        monkeypatch.setattr(enumeration, "ENUMERATE", 0)
    source = np.random.default_rng(1)
    for number in range(200):
        case = random_problem(KINDS[number % len(KINDS)], int(source.integers(4, 15)), source)
        found = Swap().solve(case)
        best = brute_force(case)
        assert case.feasible(found.pruned)
        assert found.cost == pytest.approx(case.objective.cost(found.pruned), abs=ROUNDING)
        assert found.cost == pytest.approx(best, rel=ROUNDING, abs=ROUNDING), (number, case.quota)
        assert found.status == ("proved_optimal" if look_at_all else "local_optimum")


def test_exact_equals_brute_force_also_by_branch_and_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    source = np.random.default_rng(11)
    for number in range(42):
        case = random_problem(KINDS[number % len(KINDS)], int(source.integers(5, 13)), source)
        best = brute_force(case)
        monkeypatch.setattr(exact, "ENUMERATED_SETS", 200_000 * (number % 2))
        found = Exact(starts=1).solve(case)
        assert found.cost == pytest.approx(best, rel=ROUNDING, abs=ROUNDING)
        assert (found.status, found.bound) == ("proved_optimal", found.cost)


def test_branch_and_bound_that_is_cut_off_says_so() -> None:
    matrix = np.random.default_rng(4).normal(size=(60, 60))
    found = Exact(max_nodes=3).solve(problem(Quadratic(matrix + matrix.T), 30))
    assert found.status == "time_limit"
    assert found.bound < found.cost


def test_the_solvers_are_ordered_as_they_should_be() -> None:
    source = np.random.default_rng(8)
    for number in range(10):
        case = random_problem(KINDS[number % len(KINDS)], 30, source)
        cost = {solver().name: solver().solve(case).cost for solver in SOLVERS if solver is not Slsqp}
        least = min(cost.values())
        assert cost["exact"] == pytest.approx(least, rel=1e-9, abs=1e-9)
        assert cost["exact"] <= cost["thorough"] + 1e-9 <= cost["swap"] + 2e-9
        assert cost["swap"] <= min(cost["greedy"], cost["relaxed"]) + 1e-9
        assert cost["swap"] <= Slsqp().solve(case).cost + 1e-9


def test_slsqp_says_when_it_did_nothing() -> None:
    matrix = np.random.default_rng(0).random((20, 20)) * 1e-12
    found = Slsqp().solve(problem(Quadratic(matrix + matrix.T), 10))
    assert found.status == "not_converged"
    assert "did not move" in found.warnings[0]
    slow = np.random.default_rng(0).random((40, 40))
    cut = Slsqp(time_limit=1e-6).solve(problem(Quadratic(slow + slow.T), 20))
    assert cut.status == "time_limit"


def test_thorough_repeats_itself() -> None:
    matrix = np.random.default_rng(2).normal(size=(40, 40))
    case = problem(Quadratic(matrix + matrix.T), 13)
    runs = [Thorough(rounds=5).solve(case) for _ in range(2)]
    assert np.array_equal(runs[0].pruned, runs[1].pruned)


@pytest.mark.usefixtures("search_only")
def test_a_zero_diagonal_is_solved_and_not_called_optimal() -> None:
    matrix = np.array([[0, -3, 1, 0], [-3, 0, 0, 2], [1, 0, 0, 1], [0, 2, 1, 0]], dtype=float)
    found = Swap().solve(problem(Quadratic(matrix), 2))
    assert np.flatnonzero(found.pruned).tolist() == [0, 1]
    assert found.cost == -6
    assert found.status == "local_optimum"


@pytest.mark.parametrize("kind", KINDS)
def test_the_set_does_not_depend_on_the_unit(kind: str) -> None:
    source = np.random.default_rng(7)
    for _ in range(5):
        case = random_problem(kind, 24, source)
        here = Swap().solve(case)
        for factor in (2.0**-40, 2.0**-13, 2.0**7, 2.0**40, 1e-9, 1e-8, 0.3, 1e6, 1e8):
            there = Swap().solve(_times(case, factor))
            if np.log2(factor) % 1 == 0:
                assert np.array_equal(here.pruned, there.pruned)
            assert there.cost / factor == pytest.approx(here.cost, rel=1e-9)


def _times(case: Problem, factor: float) -> Problem:
    return Problem(Quadratic(case.objective.quadratic * factor, case.objective.linear * factor), case.group, case.quota)


def test_ties_go_to_the_lowest_ids_and_are_reported() -> None:
    scores = Swap().solve(problem(Modular(np.array([2.0, 1.0, 1.0, 0.5, 1.0])), 2))
    assert np.flatnonzero(scores.pruned).tolist() == [1, 3]
    assert scores.ties == ((1, 2), (1, 4))
    pairs = np.ones((6, 6)) + np.eye(6)
    for solver in (Swap(), Relaxed()):
        found = solver.solve(problem(Quadratic(pairs), 3))
        assert np.flatnonzero(found.pruned).tolist() == [0, 1, 2]
        assert len(found.ties) == 9


def test_a_sum_of_scores_is_proved_and_a_diagonal_matrix_is_one() -> None:
    diagonal = Quadratic(np.diag([3.0, 1.0, 2.0, 0.5]))
    for solver in (Swap(), Greedy(), Relaxed()):
        found = solver.solve(problem(diagonal, 2))
        assert (np.flatnonzero(found.pruned).tolist(), found.status, found.bound) == ([1, 3], "proved_optimal", 1.5)


@pytest.mark.parametrize("experts", [5, 9])
def test_flip_and_swap_costs_are_differences_of_costs(experts: int) -> None:
    source = np.random.default_rng(experts)
    matrix = source.normal(size=(experts, experts))
    matrix = matrix + matrix.T
    quadratic = Quadratic(matrix, source.normal(size=experts))
    modular = Modular(source.normal(size=experts))
    both = Combination([quadratic, modular], [0.5, 2.0])
    free, fixed = np.arange(1, experts), np.array([0])
    shapes = [quadratic, modular, both, Restricted(both, free, fixed), restrict(quadratic, free, fixed)]
    for objective in shapes:
        pruned = source.random(objective.size) < 0.5
        before = objective.cost(pruned)
        for expert, change in enumerate(objective.marginal_costs(pruned)):
            other = pruned.copy()
            other[expert] ^= True
            assert objective.cost(other) - before == pytest.approx(change)
        for row, out in enumerate(np.flatnonzero(pruned)):
            for column, into in enumerate(np.flatnonzero(~pruned)):
                other = pruned.copy()
                other[[out, into]] = False, True
                change = objective.swap_costs(pruned)[row, column]
                assert objective.cost(other) - before == pytest.approx(change)


@pytest.mark.usefixtures("search_only")
def test_a_general_objective_is_searched_like_a_quadratic_one() -> None:
    source = np.random.default_rng(3)
    case = random_problem("indefinite", 12, source)
    general = Restricted(case.objective, np.arange(12), np.array([], dtype=int))
    found = Swap().solve(Problem(general, case.group, case.quota))
    assert found.cost == pytest.approx(brute_force(case))


def test_an_osqp_that_does_not_finish_is_never_used_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_problem("indefinite", 40, np.random.default_rng(6))
    with pytest.raises(RelaxationFailed, match="OSQP ended"):
        solve_convex(shifted(case), max_iterations=2, accuracy=1e-9)

    def hurried(program: relaxation.ConvexProgram) -> np.ndarray:
        return solve_convex(program, max_iterations=2, accuracy=1e-9)

    usual = Swap().solve(case)
    monkeypatch.setattr(solver_module, "solve_convex", hurried)
    found = Swap().solve(case)
    assert "relaxed start was left out" in found.warnings[0]
    assert found.cost <= usual.cost + 0.01 * abs(usual.cost)
    assert "greedy starts the swap search instead" in Relaxed().solve(case).warnings[1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_relaxed_point_is_feasible_and_no_direction_leads_down(kind: str) -> None:
    case = random_problem(kind, 20, np.random.default_rng(3))
    program = shifted(case)
    point = solve_convex(program, max_iterations=20_000, accuracy=1e-8)
    assert np.linalg.eigvalsh(program.matrix)[0] >= -1e-9
    assert np.bincount(case.group, weights=point) == pytest.approx(case.quota, abs=1e-5)
    slope = 2 * program.matrix @ point + program.linear
    for ids, count in zip(case.members(), case.quota):
        # Optimality of a convex program: no feasible direction goes down.
        assert slope[ids] @ point[ids] == pytest.approx(np.sort(slope[ids])[:count].sum(), abs=1e-4)
