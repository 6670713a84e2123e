"""The criterion worst_domain against its definition and brute force."""

import numpy as np
import pytest

from moeprune.selection.objective import Problem, Quadratic, WorstOf, restrict
from moeprune.selection.options import SelectionOptions
from moeprune.selection.select import select
from moeprune.selection.solvers import enumeration
from moeprune.selection.solvers.certificate import certified, lower_bound
from moeprune.selection.solvers.table import Exact, Swap
from tests.selection.cases import all_sets, random_problem, small_statistics


def _worst(kind: str, experts: int, parties: int, source: np.random.Generator) -> Problem:
    """A problem of the kind whose cost is the worst of several random quadratics with constants."""
    shape = random_problem(kind, experts, source)
    parts = []
    for _ in range(parties):
        matrix = source.random((shape.size, shape.size)) * np.exp(source.normal())
        parts.append(Quadratic(matrix + matrix.T))
    return Problem(WorstOf(tuple(parts), tuple(source.random(parties))), shape.group, shape.quota)


@pytest.mark.parametrize("kind", ["norms", "groups"])
def test_swap_finds_the_least_worst_cost_and_bounds_stay_below(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = np.random.default_rng(5)
    looked_at_all = enumeration.ENUMERATE
    for _ in range(15):
        monkeypatch.setattr(enumeration, "ENUMERATE", looked_at_all)
        case = _worst(kind, int(source.integers(6, 12)), 3, source)
        best = min(case.objective.cost(pruned) for pruned in all_sets(case))
        found = Swap().solve(case)
        assert found.cost == pytest.approx(best, rel=1e-9)
        assert Exact().solve(case).cost == pytest.approx(best, rel=1e-9)
        monkeypatch.setattr(enumeration, "ENUMERATE", 0)
        assert Swap().solve(case).cost == pytest.approx(best, rel=1e-9)  # the search alone
        bound = lower_bound(case, found.pruned)
        assert bound is not None
        assert 0.3 * best < bound.value <= best * (1 + 1e-9)
        assert certified(case, Swap().solve(case))[0].status in ("certified_gap", "proved_optimal")


def test_changes_and_restrictions_are_differences_of_costs() -> None:
    source = np.random.default_rng(9)
    objective = _worst("norms", 8, 4, source).objective
    free, fixed = np.array([1, 2, 4, 5, 6, 7]), np.array([0, 3])
    inner = restrict(objective, free, fixed)
    for _ in range(20):
        pruned = source.random(6) < 0.5
        wide = np.isin(np.arange(8), [*fixed, *free[pruned]])
        assert inner.cost(pruned) == pytest.approx(objective.cost(wide))
        for expert, change in enumerate(inner.marginal_costs(pruned)):
            other = pruned.copy()
            other[expert] ^= True
            assert inner.cost(other) - inner.cost(pruned) == pytest.approx(change)
        swaps = inner.swap_costs(pruned)
        for row, out in enumerate(np.flatnonzero(pruned)):
            for column, into in enumerate(np.flatnonzero(~pruned)):
                other = pruned.copy()
                other[[out, into]] = False, True
                assert inner.cost(other) - inner.cost(pruned) == pytest.approx(swaps[row, column])


def test_the_cost_in_the_plan_is_the_worst_share() -> None:
    statistics = small_statistics(experts=12, top_k=3)
    plan = select(statistics, SelectionOptions.parse({"criterion": "worst_domain"}))
    hope = select(statistics, SelectionOptions())
    for layer, other in zip(plan.layers, hope.layers):
        shares, others = [], []
        for domain in statistics.domains.values():
            matrix = domain[layer.name].norm_product
            shares.append(matrix[np.ix_(layer.pruned, layer.pruned)].sum() / matrix.sum())
            others.append(matrix[np.ix_(other.pruned, other.pruned)].sum() / matrix.sum())
        assert layer.cost == pytest.approx(max(shares))
        assert max(shares) <= max(others) + 1e-12
    one = select(statistics, SelectionOptions.parse({"criterion": "worst_domain", "mix": {"b": 0.0}}))
    alone = select(statistics, SelectionOptions.parse({"mix": {"b": 0.0}}))
    assert one.kept == alone.kept  # a single domain leaves nothing to balance
    warned = select(statistics, SelectionOptions.parse({"criterion": "worst_domain", "mix": {"b": 3.0}}))
    assert any("no effect" in warning for warning in warned.warnings)


def test_emphasis_weighs_the_worst_share_against_the_mean() -> None:
    statistics = small_statistics(experts=12, top_k=3)
    for emphasis in (0.0, 0.4):
        options = SelectionOptions.parse({"criterion": {"name": "worst_domain", "emphasis": emphasis}})
        for layer in select(statistics, options).layers:
            matrices = [domain[layer.name].norm_product for domain in statistics.domains.values()]
            chosen = np.ix_(layer.pruned, layer.pruned)
            shares = [matrix[chosen].sum() / matrix.sum() for matrix in matrices]
            assert layer.cost == pytest.approx(emphasis * max(shares) + (1 - emphasis) * np.mean(shares))
