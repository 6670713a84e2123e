"""The global budget against brute force over all splits, and the redundancy report."""

from itertools import product
from typing import Any

import numpy as np
import pytest

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.statistics import Layer, RoutingStatistics
from moeprune.selection.allocation import cheapest_split, cost_curve
from moeprune.selection.budget import check_budget
from moeprune.selection.criteria.criterion import LayerEvidence, gather
from moeprune.selection.layer import LayerTask, layer_tasks
from moeprune.selection.objective import Quadratic, problem
from moeprune.selection.options import SelectionOptions
from moeprune.selection.protection import protection
from moeprune.selection.redundancy import redundancy
from moeprune.selection.select import select
from tests.selection.cases import brute_force, layer_statistics, silence, small_statistics, statistics_of


def _statistics() -> RoutingStatistics:
    layers = [Layer(f"l{n}", 8, 2) for n in range(3)]
    sums = [silence(layer_statistics(8, 120, 2, n), [3] if n == 1 else []) for n in range(3)]
    return statistics_of(layers, {"a": sums})


def _tasks(statistics: RoutingStatistics, options: SelectionOptions) -> tuple[list[LayerEvidence], list[LayerTask]]:
    evidence = gather(statistics, options.mix)
    return evidence, layer_tasks(evidence, options.criterion, protection(evidence, options.budget))


def test_the_split_of_a_global_budget_is_the_cheapest_there_is() -> None:
    statistics = _statistics()
    for product_of in ("norms", "outputs"):
        raw: dict[str, Any] = {
            "criterion": {"name": "hope", "product": product_of},
            "budget": {"scope": "global", "prune": 3},
        }
        options = SelectionOptions.parse(raw)
        evidence, tasks = _tasks(statistics, options)
        scales = [options.criterion.layer_scale(item) for item in evidence]
        best = [
            {n: brute_force(problem(Quadratic(task.objective.quadratic), n)) / scale if n else 0.0 for n in range(7)}
            for task, scale in zip(tasks, scales)
        ]
        least = min(
            sum(best[i][n] for i, n in enumerate(split)) for split in product(range(7), repeat=3) if sum(split) == 9
        )
        plan = select(statistics, options)
        assert sum(len(layer.pruned) for layer in plan.layers) == 9
        assert sum(layer.cost / scale for layer, scale in zip(plan.layers, scales)) == pytest.approx(least, rel=1e-9)


def test_the_dynamic_program_equals_brute_force_on_any_curves() -> None:
    source = np.random.default_rng(0)
    for _ in range(50):
        curves = [{int(c): float(source.normal()) for c in source.choice(6, 4, replace=False)} for _ in range(3)]
        wanted = int(source.integers(3, 16))
        sums: dict[int, float] = {}
        for split in product(*(curve.items() for curve in curves)):
            count = sum(c for c, _ in split)
            if count <= wanted:
                sums[count] = min(sums.get(count, np.inf), sum(cost for _, cost in split))
        found = cheapest_split(curves, wanted)
        if found is None:
            assert not sums
        else:
            assert sum(found) == max(sums)
            assert sum(curve[c] for curve, c in zip(curves, found)) == pytest.approx(sums[max(sums)])


def test_a_global_budget_keeps_floors_and_multiples() -> None:
    raw: dict[str, Any] = {"budget": {"scope": "global", "prune": 0.4, "floor": 4, "ceiling": 0.9, "multiple_of": 2}}
    plan = select(_statistics(), SelectionOptions.parse(raw))
    counts = [len(layer.kept) for layer in plan.layers]
    assert set(counts) <= {4, 6}
    assert sum(counts) == 24 - 8
    assert any("asks for 9 experts in all; 8 go" in warning for warning in plan.warnings)
    for budget in ({"prune": 0.7, "floor": 4}, {"prune": 0.1, "ceiling": 4}, {"prune": 0.01}):
        parsed = SelectionOptions.parse({"budget": {"scope": "global", **budget}})
        with pytest.raises(InputError, match="allow"):
            select(_statistics(), parsed)
        with pytest.raises(InputError, match="allow"):
            check_budget(_statistics().layers, parsed.budget)
    raw = {"budget": {"scope": "global", "prune": 0.5, "floor": 3, "ceiling": 3, "multiple_of": 2}}
    with pytest.raises(InputError, match="no kept count is a multiple of 2"):
        check_budget(_statistics().layers, SelectionOptions.parse(raw).budget)


def test_curves_are_costs_of_real_sets_and_the_report_has_a_knee() -> None:
    statistics = small_statistics()
    options = SelectionOptions.parse({})
    _, tasks = _tasks(statistics, options)
    curve = cost_curve(tasks[0], range(7))
    for count, cost in curve.items():
        assert cost == pytest.approx(brute_force(problem(tasks[0].objective, count)) if count else 0.0, abs=1e-12)
    report = redundancy(statistics, options)
    assert report["criterion"] == "hope"
    for layer in report["layers"]:
        assert layer["pruned"] == list(range(7))
        assert layer["cost"][0] == 0
        assert np.all(np.diff(layer["cost"]) > 0)
        assert 0 < layer["knee"]["fraction"] < 1
        assert layer["knee"]["cost"] == layer["cost"][int(layer["knee"]["pruned"])]
