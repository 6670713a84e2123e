"""Against the public HOPE code on two tiny models: its first-order sets, and its objective."""

import json
from pathlib import Path

import numpy as np
import pytest

from moeprune.artifacts.statistics import Layer, LayerStatistics, RoutingStatistics
from moeprune.selection.options import SelectionOptions
from moeprune.selection.select import select
from tests.selection.cases import statistics_of

HERE = Path(__file__).parent / "oracles"
BUDGETS = {"0p25": 0.25, "0p3": 0.3, "0p5": 0.5, "3": 3}
METHODS = {"reap": "reap", "ean": "ean", "man": "man", "freq": "frequency"}


def _load(model: str) -> tuple[RoutingStatistics, dict[str, dict[str, list[int]]]]:
    arrays = np.load(HERE / model / "statistics.npz")
    layers, sums = [], []
    for ordinal in range(len({name.split("/")[0] for name in arrays})):
        read = {name.split("/")[1]: arrays[name] for name in arrays if name.startswith(f"layer_{ordinal}/")}
        experts = len(read["gate_sums"])
        layers.append(Layer(f"model.layers.{ordinal}.mlp", experts, top_k=4))
        sums.append(
            LayerStatistics(
                tokens=read["total_tokens"],
                co_count=read["coselect_counts"],
                norm_product=read["norm_prod_sums"],
                output_product=np.zeros((experts, experts)),
                gate_sum=read["gate_sums"],
                norm_sum=read["norm_sums"],
                norm_square_sum=read["norm_square_sums"],
                gated_norm_sum=read["gate_norm_sums"],
                output_max=np.zeros(experts),
            )
        )
    return statistics_of(layers, {"all": sums}), json.loads((HERE / model / "prune_sets.json").read_text())


@pytest.mark.parametrize("model", ["qwen3moe", "glm4moe"])
@pytest.mark.parametrize("label", BUDGETS)
@pytest.mark.parametrize("method", METHODS)
def test_first_order_sets_are_those_of_the_public_code(model: str, label: str, method: str) -> None:
    statistics, sets = _load(model)
    options = SelectionOptions.parse({"criterion": METHODS[method], "budget": {"prune": BUDGETS[label]}})
    plan = select(statistics, options)
    assert {str(n): list(layer.pruned) for n, layer in enumerate(plan.layers)} == sets[f"{method}_{label}"]
    assert {layer.status for layer in plan.layers} == {"proved_optimal"}


@pytest.mark.parametrize("model", ["qwen3moe", "glm4moe"])
@pytest.mark.parametrize("label", BUDGETS)
def test_hope_never_costs_more_than_the_public_code(model: str, label: str) -> None:
    statistics, sets = _load(model)
    options = SelectionOptions.parse(
        {"criterion": {"name": "hope", "normalise": "co_selected"}, "budget": {"prune": BUDGETS[label]}}
    )
    for ordinal, layer in enumerate(select(statistics, options).layers):
        theirs = sets[f"hope_{label}"][str(ordinal)]
        sums = statistics.domains["all"][layer.name]
        matrix = np.divide(sums.norm_product, sums.co_count, out=np.zeros((16, 16)), where=sums.co_count > 0)
        assert layer.cost == pytest.approx(matrix[np.ix_(layer.pruned, layer.pruned)].sum(), rel=1e-12)
        assert len(layer.pruned) == len(theirs)
        assert layer.cost <= matrix[np.ix_(theirs, theirs)].sum() * (1 + 1e-12)
