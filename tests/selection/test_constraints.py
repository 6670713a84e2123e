"""Every constraint holds in every plan, and clashes are named (properties, hypothesis)."""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.statistics import Layer, LayerStatistics, RoutingStatistics
from moeprune.selection.criteria.criterion import gather
from moeprune.selection.options import SelectionOptions
from moeprune.selection.protection import SUPER_SHARE, super_experts
from moeprune.selection.select import select
from tests.selection.cases import layer_statistics, silence, statistics_of

CACHE: dict[tuple[int, int, int], LayerStatistics] = {}


def _sums(experts: int, top_k: int, seed: int) -> LayerStatistics:
    key = (experts, top_k, seed)
    if key not in CACHE:
        CACHE[key] = layer_statistics(experts, 60, top_k, seed)
    return CACHE[key]


@st.composite
def _cases(draw: Any) -> tuple[RoutingStatistics, dict[str, Any]]:
    groups = draw(st.sampled_from([1, 2, 4]))
    experts = groups * draw(st.integers(3, 5)) if groups > 1 else draw(st.integers(5, 14))
    top_k = draw(st.integers(1, 3))
    topk_group = draw(st.integers(1, groups))
    layers = [
        Layer(f"l{n}", experts, top_k, groups, topk_group, draw(st.integers(1, 2)) if groups > 1 else 1)
        for n in range(2)
    ]
    dead = draw(st.lists(st.integers(0, experts - 1), max_size=2))
    seeds = [draw(st.integers(0, 3)) for _ in layers]
    domains = {d: [silence(_sums(experts, top_k, s + 10 * n), dead) for s in seeds] for n, d in enumerate("ab")}
    budget: dict[str, Any] = {
        "prune": draw(st.one_of(st.integers(1, experts), st.floats(0.05, 0.95))),
        "scope": draw(st.sampled_from(["layer", "global"])),
        "multiple_of": draw(st.sampled_from([1, 1, 2, 3])),
        "must_keep": {"l0": draw(st.lists(st.integers(0, experts - 1), max_size=3))},
    }
    if draw(st.booleans()):
        budget["keep_at_least"] = draw(st.sampled_from([0.2, 0.5, 0.7, {"b": 0.6}]))
    if draw(st.booleans()):
        budget["floor"] = draw(st.sampled_from([2, 0.4]))
    if draw(st.booleans()):
        budget["ceiling"] = draw(st.sampled_from([0.9, 0.6]))
    budget["protect_super_experts"] = draw(st.booleans())
    solver = draw(st.sampled_from(["swap", "greedy", "relaxed", "thorough", "exact"]))
    criterion = draw(st.sampled_from(["hope", "worst_domain", "reap", "frequency"]))
    options = {"budget": budget, "solver": {"name": solver, "certificate": draw(st.booleans())}, "criterion": criterion}
    if solver == "thorough":
        options["solver"].update(rounds=2, starts=3)
    return statistics_of(layers, domains), options


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(_cases())
def test_every_constraint_holds_or_is_named(case: tuple[RoutingStatistics, dict[str, Any]]) -> None:
    statistics, raw = case
    options = SelectionOptions.parse(raw)
    budget = options.budget
    try:
        plan = select(statistics, options)
    except InputError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert "selection.budget" in refusal or "top_k" in refusal
        return
    total = sum(layer.num_experts for layer in plan.layers)
    gone = sum(len(layer.pruned) for layer in plan.layers)
    asked = budget.prune * len(plan.layers) if isinstance(budget.prune, int) else budget.prune * total
    assert 0 < gone <= asked + 1e-9
    for layer, facts in zip(plan.layers, statistics.layers):
        kept = np.array(layer.kept)
        assert len(kept) % budget.multiple_of == 0 or len(kept) == layer.num_experts
        per_group = np.bincount(kept * facts.num_groups // facts.num_experts, minlength=facts.num_groups)
        assert len(set(per_group)) == 1
        assert len(kept) >= facts.top_k
        if facts.num_groups > 1:
            assert per_group[0] >= facts.group_minimum
            assert per_group[0] * facts.topk_group >= facts.top_k
        assert set(budget.must_keep.get(layer.name, ())) <= set(layer.kept)
        if isinstance(budget.floor, int):
            assert len(kept) >= budget.floor
        elif budget.floor:
            assert len(kept) >= budget.floor * layer.num_experts - 1e-9
        if budget.ceiling:
            assert len(kept) <= budget.ceiling * layer.num_experts + 1e-9
        if budget.protect_super_experts:
            assert set(super_experts(gather(statistics, {})).get(layer.name, ())) <= set(layer.kept)
        shares = budget.keep_at_least or {}
        for domain, share in (shares if isinstance(shares, dict) else dict.fromkeys("ab", shares)).items():
            count = statistics.domains[domain][layer.name].count
            assert count[kept].sum() >= share * count.sum() - 1e-6
        assert layer.bound is None or layer.bound <= layer.cost


def test_keep_at_least_binds_and_a_clash_names_the_share() -> None:
    layers = [Layer("l0", 12, 2)]
    statistics = statistics_of(layers, {"a": [_sums(12, 2, 1)], "b": [_sums(12, 2, 2)]})
    free = select(statistics, SelectionOptions.parse({"criterion": "man"}))
    count = statistics.domains["a"]["l0"].count
    held = count[list(free.layers[0].kept)].sum() / count.sum()
    share = min(0.95, held + 0.08)
    bound = select(statistics, SelectionOptions.parse({"criterion": "man", "budget": {"keep_at_least": {"a": share}}}))
    assert bound.layers[0].kept != free.layers[0].kept
    assert bound.layers[0].cost > free.layers[0].cost
    with pytest.raises(InputError, match=r"selection\.budget\.prune .* clashes with .*keep_at_least\.a=0\.99"):
        select(statistics, SelectionOptions.parse({"budget": {"keep_at_least": {"a": 0.99}}}))
    with pytest.raises(InputError, match="not a mixed domain"):
        select(statistics, SelectionOptions.parse({"budget": {"keep_at_least": {"c": 0.5}}}))


def test_super_experts_are_those_of_the_rule_and_stay() -> None:
    layers = [Layer(f"l{n}", 16, 2) for n in range(4)]
    statistics = statistics_of(layers, {"a": [silence(_sums(16, 2, n), [0]) for n in range(4)]})
    for number, name in ((2, "l0"), (7, "l3")):
        statistics.domains["a"][name].output_max[number] = 1e4 - number
    found = super_experts(gather(statistics, {}))
    maxima = np.array([statistics.domains["a"][layer.name].output_max for layer in layers])
    seen = maxima[np.isfinite(maxima)]
    limit = max(np.quantile(seen, 0.995), SUPER_SHARE * seen.max())
    expected = {f"l{n}": tuple(np.flatnonzero(maxima[n] > limit)) for n in range(3) if (maxima[n] > limit).any()}
    assert found == expected
    assert expected
    raw: dict[str, Any] = {"criterion": "frequency", "budget": {"protect_super_experts": True}}
    plan = select(statistics, SelectionOptions.parse(raw))
    for layer in plan.layers:
        assert set(expected.get(layer.name, ())) <= set(layer.kept)
    assert any("super-expert" in warning for warning in plan.warnings)


def test_floor_and_ceiling_clash_with_the_budget() -> None:
    statistics = statistics_of([Layer("l0", 12, 2)], {"a": [_sums(12, 2, 1)]})
    for budget, word in (({"floor": 0.75}, "floor"), ({"ceiling": 4}, "ceiling")):
        with pytest.raises(InputError, match=rf"selection\.budget\.{word}"):
            select(statistics, SelectionOptions.parse({"budget": {**budget, "prune": 0.5}}))
