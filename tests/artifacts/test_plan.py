"""A plan validates itself and knows its model."""

import json

import pytest

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import load_metrics, save_metrics
from moeprune.artifacts.plan import LayerPlan, PrunePlan
from moeprune.artifacts.statistics import Layer

PLAN = {
    "format": "moeprune.plan/1",
    "model_type": "qwen3_moe",
    "model_fingerprint": "f",
    "statistics_key": "k",
    "criterion": {"name": "hope"},
    "solver": {"name": "swap"},
    "budget": {"prune": 0.5},
    "mix": {"agent": 1.0},
    "layers": [{"name": "m.0", "num_experts": 8, "top_k": 2, "kept": [0, 2, 5, 7]}],
}


def with_layer(**changes):
    return PLAN | {"layers": [PLAN["layers"][0] | changes]}


def test_a_plan_comes_back_from_disk(tmp_path):
    plan = PrunePlan.parse(PLAN, place="here")
    plan.save(tmp_path / "plan.json")
    assert PrunePlan.load(tmp_path / "plan.json") == plan
    assert plan.layers[0].pruned == (1, 3, 4, 6)
    assert plan.uniform_count == 4


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (with_layer(kept=[2, 0, 5, 7]), "ascending"),
        (with_layer(kept=[0, 0, 5, 7]), "distinct"),
        (with_layer(kept=[0, 2, 5, 8]), r"in 0\.\.7"),
        (with_layer(kept=[3]), "top_k=2"),
        (with_layer(kept=[0, 1, 2, 4], num_groups=2), "same number in each"),
        (with_layer(kept=list(range(8))), "removes nothing"),
        (with_layer(cost=float("nan")), "cost is nan"),
        (PLAN | {"layers": []}, "no layers"),
        (PLAN | {"layers": PLAN["layers"] * 2}, "stands twice"),
        (PLAN | {"format": "other/1"}, "format"),
        (PLAN | {"extra": 1}, "extra"),
    ],
)
def test_a_bad_plan_is_explained(value, message):
    with pytest.raises(InputError, match=message):
        PrunePlan.parse(value, place="plan.json")


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Layer("m.1", 8, 2), "same MoE layers: m.0, m.1"),
        (Layer("m.0", 16, 2), "m.0 has 16 experts"),
        (Layer("m.0", 8, 4), "top_k=4, the plan says"),
    ],
)
def test_a_plan_that_was_edited_does_not_fit(layer, message):
    plan = PrunePlan.parse(PLAN, place="here")
    plan.require_layers([Layer("m.0", 8, 2)], "model")
    with pytest.raises(InputError, match=message):
        plan.require_layers([layer], "model")


def test_a_plan_for_another_model_is_refused():
    with pytest.raises(InputError, match="made for another model"):
        PrunePlan.parse(PLAN, place="here").require_model("g", "model")


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '{"format": 3}'])
def test_a_file_that_is_no_plan_is_bad_input(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"plan\.json"):
        PrunePlan.load(path)


def test_layers_that_differ_have_no_common_count():
    layers = [LayerPlan(name=f"m.{n}", num_experts=8, top_k=2, kept=tuple(range(n + 2))) for n in range(2)]
    assert PrunePlan.parse(PLAN | {"layers": [layer.model_dump() for layer in layers]}, place="x").uniform_count is None


def test_metrics_are_finite_numbers(tmp_path):
    save_metrics(tmp_path / "metrics.json", {"b": 2, "a": 0.5})
    assert list(json.loads((tmp_path / "metrics.json").read_text())) == ["a", "b"]
    assert load_metrics(tmp_path / "metrics.json") == {"a": 0.5, "b": 2.0}
    with pytest.raises(ValueError, match="metric c"):
        save_metrics(tmp_path / "metrics.json", {"c": float("inf")})
    assert load_metrics(tmp_path / "metrics.json") == {"a": 0.5, "b": 2.0}
