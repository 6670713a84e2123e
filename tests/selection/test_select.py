"""From statistics to a plan: budgets, groups, dead experts, messages."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.plan import PrunePlan
from moeprune.artifacts.statistics import Layer
from moeprune.selection.criteria.criterion import LayerEvidence, mix_shares
from moeprune.selection.criteria.table import CRITERION_NAMES
from moeprune.selection.objective import Modular
from moeprune.selection.options import SelectionOptions
from moeprune.selection.select import select
from tests.selection.cases import layer_statistics, silence, small_statistics, statistics_of

FIRST_LAYER = "model.layers.0.mlp"


def _select(statistics: Any, **selection: Any) -> PrunePlan:
    return select(statistics, SelectionOptions.parse(selection))


@pytest.mark.parametrize("criterion", [name for name in CRITERION_NAMES if name != "file"])
def test_every_criterion_makes_a_plan_that_survives_its_file(criterion: str, tmp_path: Path) -> None:
    statistics = small_statistics()
    plan = _select(statistics, criterion=criterion)
    assert plan.uniform_count == 4
    assert plan == _select(statistics, criterion=criterion)
    plan.save(tmp_path / "plan.json")
    assert PrunePlan.load(tmp_path / "plan.json") == plan
    assert {layer.status for layer in plan.layers} == {"proved_optimal"}  # sorted, or every set looked at
    larger = _select(small_statistics(experts=24, top_k=4), criterion=criterion, solver={"name": "swap", "starts": 4})
    searched = criterion in ("hope", "worst_domain", "reroute")
    assert {layer.status for layer in larger.layers} == {"local_optimum" if searched else "proved_optimal"}


@pytest.mark.parametrize(
    ("prune", "word"),
    [
        (0, "nothing"),
        (-1, "nothing"),
        (1.0, "fraction"),
        (0.0, "fraction"),
        (25.0, "0.25"),
        ("50%", "number"),
        (-0.5, "fraction"),
        (float("nan"), "fraction"),
        (float("inf"), "fraction"),
        (True, "number"),
        ("0.5", "number"),
    ],
)
def test_a_budget_that_means_nothing_is_refused(prune: Any, word: str) -> None:
    with pytest.raises(InputError, match=f"selection.budget.prune.*{word}"):
        SelectionOptions.parse({"budget": {"prune": prune}})


@pytest.mark.parametrize(
    ("prune", "removed"), [(0.5, 4), (0.3, 2), (3, 3), (0.99, None), (7, None), (8, None), (0.1, None)]
)
def test_counts_are_rounded_down_and_stop_at_top_k(prune: float, removed: int | None) -> None:
    statistics = small_statistics()
    if removed is None:
        with pytest.raises(InputError, match=r"top_k=2; lower|removes nothing"):
            _select(statistics, budget={"prune": prune})
        return
    plan = _select(statistics, budget={"prune": prune})
    assert {len(layer.pruned) for layer in plan.layers} == {removed}


def test_a_decimal_fraction_is_read_as_written() -> None:
    layer = Layer("l", 100, 1)
    statistics = statistics_of([layer], {"a": [layer_statistics(100, 5, 1, 0)]})
    assert len(_select(statistics, criterion="frequency", budget={"prune": 0.29}).layers[0].pruned) == 29


def test_multiples_round_the_kept_count_up_and_say_so() -> None:
    plan = _select(small_statistics(), budget={"prune": 5, "multiple_of": 4})
    assert plan.uniform_count == 4
    assert any("asked for 5" in warning for warning in plan.warnings)
    with pytest.raises(InputError, match=r"removes nothing.*raise it to 4 or more"):
        _select(small_statistics(), budget={"prune": 3, "multiple_of": 4})


def test_the_remedy_in_the_message_works() -> None:
    statistics = small_statistics(experts=7, top_k=3)
    with pytest.raises(InputError) as error:
        _select(statistics, budget={"prune": 0.9})
    value = float(str(error.value).split("prune to ")[1].split(" ")[0])
    assert {len(layer.kept) for layer in _select(statistics, budget={"prune": value}).layers} == {3}


def test_groups_keep_equal_numbers_and_enough_of_them() -> None:
    statistics = small_statistics(experts=16, top_k=4, groups=4)
    plan = _select(statistics, budget={"prune": 0.5})
    for layer in plan.layers:
        assert [sum(e // 4 == g for e in layer.kept) for g in range(4)] == [2, 2, 2, 2]
    with pytest.raises(InputError, match="groups"):
        _select(statistics, budget={"prune": 0.75})


def test_dead_experts_go_first_and_are_named() -> None:
    layer = Layer(FIRST_LAYER, 8, 2, scoring="softmax")
    statistics = statistics_of([layer], {"a": [silence(layer_statistics(8, 200, 2, 0), [1, 5])]})
    for criterion in CRITERION_NAMES:
        if criterion == "file":
            continue
        plan = _select(statistics, criterion=criterion, budget={"prune": 3})
        assert {1, 5} <= set(plan.layers[0].pruned)
        assert any("experts 1, 5" in warning for warning in plan.warnings)
    assert _select(statistics, budget={"prune": 1}).layers[0].pruned == (1,)
    kept = _select(statistics, budget={"prune": 3, "must_keep": {FIRST_LAYER: [5]}})
    assert 5 in kept.layers[0].kept
    assert any("expert 5 stay" in warning for warning in kept.warnings)


def test_must_keep_is_kept_and_clashes_are_named() -> None:
    statistics = small_statistics()
    free = _select(statistics, criterion="reap")
    victim = free.layers[0].pruned[0]
    assert victim in _select(statistics, criterion="reap", budget={"must_keep": {FIRST_LAYER: [victim]}}).layers[0].kept
    with pytest.raises(InputError, match=r"must_keep .* hold 5 experts but selection.budget.prune leaves 4"):
        _select(statistics, budget={"must_keep": {FIRST_LAYER: [0, 1, 2, 3, 4]}})
    with pytest.raises(InputError, match="did you mean"):
        _select(statistics, budget={"must_keep": {"model.layers.0.mpl": [1]}})
    with pytest.raises(InputError, match=r"not in 0..7"):
        _select(statistics, budget={"must_keep": {FIRST_LAYER: [8]}})


def test_the_mix_decides_and_its_shares_are_effective() -> None:
    statistics = small_statistics()
    assert mix_shares(statistics, {"a": 3.0}) == {"a": 0.75, "b": 0.25}
    alone = _select(statistics, criterion="reap", mix={"b": 0.0})
    other = _select(statistics, criterion="reap", mix={"a": 0.0})
    assert alone.kept != other.kept
    with pytest.raises(InputError, match="unknown domain"):
        _select(statistics, mix={"c": 1.0})


def test_the_unit_of_the_statistics_changes_no_set() -> None:
    statistics = small_statistics(experts=16, top_k=4)
    scaled = {
        domain: {
            name: replace(s, norm_product=s.norm_product * 2.0**-80, output_product=s.output_product * 2.0**-80)
            for name, s in layers.items()
        }
        for domain, layers in statistics.domains.items()
    }
    for normalise in ("co_selected", "all_tokens"):
        criterion = {"name": "hope", "normalise": normalise}
        here = _select(statistics, criterion=criterion)
        there = _select(replace(statistics, domains=scaled), criterion=criterion)
        assert here.kept == there.kept


def test_a_certificate_lands_in_the_plan() -> None:
    plan = _select(small_statistics(), solver={"name": "swap", "certificate": True})
    for layer in plan.layers:
        assert layer.status == "proved_optimal"
        assert layer.bound == layer.cost
        assert layer.gap == 0


def test_top_1_routing_says_that_hope_has_no_pairs() -> None:
    statistics = small_statistics(top_k=1)
    plan = _select(statistics)
    assert any("top_k is 1" in warning for warning in plan.warnings)
    assert plan.layers[0].status == "proved_optimal"


def test_a_prune_set_from_a_file_is_taken_as_it_is(tmp_path: Path) -> None:
    statistics = small_statistics()
    path = tmp_path / "set.json"
    forms = [
        {"0": [7, 0, 3, 4], "1": [1, 2, 3, 4]},
        {"pruned": {FIRST_LAYER: [0, 3, 4, 7], "model.layers.1.mlp": [1, 2, 3, 4]}},
        {"kept": {"0": [1, 2, 5, 6], "1": [0, 5, 6, 7]}},
    ]
    for form in forms:
        path.write_text(json.dumps(form))
        plan = _select(statistics, criterion={"name": "file", "path": str(path)})
        assert [layer.pruned for layer in plan.layers] == [(0, 3, 4, 7), (1, 2, 3, 4)]
        assert not plan.warnings
        assert {layer.status for layer in plan.layers} == {"given"}
    asked = {"budget": {"keep_at_least": 0.99, "protect_super_experts": True}, "solver": {"certificate": True}}
    plan = _select(statistics, criterion={"name": "file", "path": str(path)}, **asked)
    assert [warning.split(":")[0] for warning in plan.warnings[:3]] == [
        "selection.budget.keep_at_least",
        "selection.budget.protect_super_experts",
        "selection.solver.certificate",
    ]
    plan.save(tmp_path / "plan.json")
    again = _select(statistics, criterion={"name": "file", "path": str(tmp_path / "plan.json")}, budget={"prune": 2})
    assert again.kept == plan.kept
    assert "the file decides" in again.warnings[0]
    for bad, word in (({"0": [1]}, "no entry"), ({"0": [9], "1": [1]}, "0..7"), ({"2": [1]}, "not an MoE layer")):
        path.write_text(json.dumps(bad))
        with pytest.raises(InputError, match=word):
            _select(statistics, criterion={"name": "file", "path": str(path)})


class HighestFirst:
    """A criterion from outside: prunes the highest ids."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def objective(self, evidence: LayerEvidence) -> Modular:
        return Modular(-self.factor * np.arange(evidence.layer.num_experts))


class TooShort(HighestFirst):
    """One cost too few."""

    def objective(self, evidence: LayerEvidence) -> Modular:
        return Modular(super().objective(evidence).scores[1:])


class Bare(HighestFirst):
    """Scores where an objective is asked for."""

    def objective(self, evidence: LayerEvidence) -> Any:
        return super().objective(evidence).scores


def test_a_criterion_of_ones_own() -> None:
    plan = _select(small_statistics(), criterion={"name": f"{__name__}:HighestFirst", "factor": 2.0})
    assert plan.layers[0].pruned == (4, 5, 6, 7)
    assert plan.criterion == {"name": f"{__name__}:HighestFirst", "factor": 2.0}
    for name, word in ((f"{__name__}:Nothing", "has no Nothing"), ("no.such.module:X", "cannot import")):
        with pytest.raises(InputError, match=word):
            _select(small_statistics(), criterion={"name": name})
    with pytest.raises(InputError, match="refuses its options"):
        _select(small_statistics(), criterion={"name": f"{__name__}:HighestFirst", "speed": 1})
    for name, word in (("TooShort", "gave Modular of size 7 for the 8 experts"), ("Bare", "gave ndarray")):
        with pytest.raises(InputError, match=word):
            _select(small_statistics(), criterion={"name": f"{__name__}:{name}"})


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'reap'"):
        SelectionOptions.parse({"criterion": {"name": "raep"}})
    with pytest.raises(InputError, match=r"selection.criterion"):
        SelectionOptions.parse({"criterion": {"name": "hope", "prodct": "norms"}})
    with pytest.raises(InputError, match="shrinkage"):
        SelectionOptions.parse({"criterion": {"name": "hope", "shrinkage": 3.0}})
