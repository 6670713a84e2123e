"""The criterion reroute: what it predicts is what the pruned model computes, whatever the family's routing rule."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.plan import LayerPlan, PrunePlan
from moeprune.artifacts.routing import affinities, choices, routed
from moeprune.artifacts.statistics import Layer, RoutingStatistics
from moeprune.models.families import FAMILIES
from moeprune.models.layers import find_moe_layers, model_fingerprint
from moeprune.models.pruned import pruned
from moeprune.recording.recorder import record
from moeprune.selection.criteria import reroute
from moeprune.selection.criteria.reroute import Rerouted
from moeprune.selection.objective import problem
from moeprune.selection.options import SelectionOptions
from moeprune.selection.select import select
from moeprune.selection.solvers.search import greedy_forward, moves_of
from tests.selection.cases import layer_statistics, small_statistics, statistics_of
from tests.tiny import build
from tests.tokens import random_pieces, token_set

PIECES = random_pieces([64])  # not padded: sparse attention breaks ties another way in padded batches
# Every verified family whose rule can be replayed, and the switches that their tiny models leave at one setting.
VARIANTS = [(name, {}) for name, row in FAMILIES.items() if row.verified and row.scoring]
VARIANTS += [("qwen3_moe", {"norm_topk_prob": False}), ("deepseek_v3", {"norm_topk_prob": False})]
VARIANTS += [("deepseek_v3", {"n_routed_experts": 16, "n_group": 4, "topk_group": 2})]
VARIANTS += [("glm4_moe", {"n_group": 1})]


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda variant: "-".join(map(str, (variant[0], *variant[1]))))
def tiny(request):
    name, options = request.param
    return build(name, **options)


@pytest.fixture(scope="module")
def recorded(tiny):
    return record(tiny, token_set(PIECES), statistics="samples")  # hidden size 32: the projection is the identity


def objective_of(statistics: RoutingStatistics, layer: Layer) -> Rerouted:
    return Rerouted(layer, statistics.domains["all"][layer.name].sample)


def test_with_nothing_masked_the_replay_is_what_the_model_did(tiny, recorded):
    layers = find_moe_layers(tiny)
    seen = {}
    handles = [
        layer.router.register_forward_hook(lambda m, args, out, name=layer.name: seen.update({name: out}))
        for layer in layers
    ]
    with torch.no_grad():
        tiny(input_ids=torch.tensor(PIECES[:1]))
    for handle in handles:
        handle.remove()
    for layer in layers:
        logits, gates, ids = (value.numpy() for value in seen[layer.name])
        bias = recorded.domains["all"][layer.name].sample.bias
        everyone = np.ones(layer.info.num_experts, dtype=bool)
        scores = affinities(layer.info, logits), choices(layer.info, logits, bias)
        found, weights = routed(layer.info, *scores, everyone)
        for row in range(len(ids)):
            expected = dict(zip(ids[row].tolist(), gates[row].tolist()))
            assert dict(zip(found[row].tolist(), weights[row].tolist())) == pytest.approx(expected, rel=1e-5)


def test_the_cost_of_a_set_is_the_error_of_the_pruned_block(tiny, recorded):
    layers = find_moe_layers(tiny)
    gone = np.arange(layers[0].info.num_experts) % 4 == 0  # as many of every group
    plan = _plan(tiny, layers, tuple(np.flatnonzero(~gone).tolist()))
    inputs = _block_inputs(tiny, layers)
    for layer in layers:
        with torch.no_grad():
            whole = [_before_norm(layer, hidden) for hidden in inputs[layer.name]]
            with pruned(tiny, plan):
                fewer = [_before_norm(layer, hidden) for hidden in inputs[layer.name]]
        error = sum(float((a - b).double().square().sum()) for a, b in zip(whole, fewer))
        objective = objective_of(recorded, layer.info)
        assert error > 1
        assert objective.cost(gone) == pytest.approx(error, rel=1e-4)
        assert objective.cost(np.zeros_like(gone)) == 0


def _before_norm(layer, hidden):
    """The block's output, or what its norm of the sum is given."""
    if not layer.family.normalised_by:
        output = layer.block(hidden)
        return output[0] if isinstance(output, tuple) else output
    seen = []
    norm = getattr(layer.block, layer.family.normalised_by)
    handle = norm.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    layer.block(hidden)
    handle.remove()
    return seen[0]


def _plan(model, layers, kept):
    facts = [(layer.name, layer.info.num_experts, layer.info.top_k, layer.info.num_groups) for layer in layers]
    names = ("name", "num_experts", "top_k", "num_groups")
    return PrunePlan(
        model_type=model.config.model_type,
        model_fingerprint=model_fingerprint(model, layers),
        statistics_key="test",
        criterion={},
        solver={},
        budget={},
        mix={},
        layers=tuple(LayerPlan(**dict(zip(names, its)), kept=kept) for its in facts),
    )


def _block_inputs(model, layers):
    """Layer name -> inputs of the block, one a piece."""
    seen = {layer.name: [] for layer in layers}
    handles = [
        layer.block.register_forward_pre_hook(lambda m, args, name=layer.name: seen[name].append(args[0].clone()))
        for layer in layers
    ]
    with torch.no_grad():
        for piece in PIECES:
            model(input_ids=torch.tensor([piece]))
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("cancelled", [reroute.CANCELLED, 2.0])  # 2: every exchange is summed anew
def test_changes_are_differences_of_costs(tiny, recorded, cancelled, monkeypatch):
    monkeypatch.setattr(reroute, "CANCELLED", cancelled)
    monkeypatch.setattr(reroute, "BLOCK", 2**14)  # several gathers
    layer = recorded.layers[-1]
    source = np.random.default_rng(0)
    for _ in range(6):
        objective = objective_of(recorded, layer)
        whole = objective.cost(np.ones(layer.num_experts, dtype=bool))
        gone = source.random(layer.num_experts) < source.random()
        before, flips, swaps = objective.cost(gone), objective.marginal_costs(gone), objective.swap_costs(gone)
        for expert in range(layer.num_experts):
            after = objective.cost(gone ^ (np.arange(layer.num_experts) == expert))
            assert flips[expert] == pytest.approx(after - before, abs=1e-9 * whole)
        for row, out in enumerate(np.flatnonzero(gone)):
            for column, into in enumerate(np.flatnonzero(~gone)):
                after = objective.cost(gone ^ np.isin(np.arange(layer.num_experts), (out, into)))
                assert swaps[row, column] == pytest.approx(after - before, abs=1e-9 * whole)


def test_one_start_is_backward_elimination_then_exchanges(recorded):
    layer = recorded.layers[0]
    section = {"criterion": "reroute", "solver": {"name": "swap", "starts": 1}, "budget": {"prune": 4}}
    if layer.num_groups > 1 or layer.num_experts != 8:
        pytest.skip("the loop below knows no groups")
    objective = objective_of(recorded, layer)
    gone = np.zeros(8, dtype=bool)
    for _ in range(4):
        trials = [np.inf if gone[e] else objective.cost(gone | (np.arange(8) == e)) for e in range(8)]
        gone[int(np.argmin(trials))] = True
    np.testing.assert_array_equal(greedy_forward(moves_of(objective), problem(objective, 4)), gone)
    plan = select(recorded, SelectionOptions.parse(section))
    assert plan.layers[0].cost <= objective.cost(gone) * (1 + 1e-12)
    assert select(recorded, SelectionOptions.parse(section)) == plan
    swaps = objective.swap_costs(np.isin(np.arange(8), plan.layers[0].pruned))
    assert swaps.min() >= -1e-9 * plan.layers[0].cost


def test_peaked_routers_leave_no_rounding_noise():
    """A token that gave everything to a pruned expert is summed anew: subtraction would leave nothing but noise."""
    source = np.random.default_rng(3)
    statistics = record(build("qwen3_moe"), token_set(PIECES), statistics="samples")
    layer = statistics.layers[0]
    sample = statistics.domains["all"][layer.name].sample
    logits = (source.permuted(np.tile(np.arange(8.0), (len(sample.logits), 1)), axis=1) * 60).astype(np.float32)
    objective = Rerouted(layer, type(sample)(**{**vars(sample), "logits": logits}))
    gone = np.zeros(8, dtype=bool)
    for expert, change in enumerate(objective.marginal_costs(gone)):
        assert change == pytest.approx(objective.cost(np.arange(8) == expert), rel=1e-9)


def test_statistics_without_a_sample_are_refused_with_the_option_to_set():
    layer = Layer("m.0", 8, 2, scoring="softmax")
    statistics = statistics_of([layer], {"a": [replace(layer_statistics(8, 50, 2, 0), sample=None)]})
    with pytest.raises(InputError, match=r"reroute needs a token sample.*calibration\.statistics: samples"):
        select(statistics, SelectionOptions.parse({"criterion": "reroute"}))


def test_budgets_bounds_halves_and_groups_work_with_it():
    section = {"criterion": "reroute", "solver": {"name": "swap", "starts": 1}}
    plan = select(small_statistics(), SelectionOptions.parse(section | {"budget": {"scope": "global", "prune": 3}}))
    assert sum(len(layer.pruned) for layer in plan.layers) == 6
    assert all(0 <= layer.stability["jaccard"] <= 1 for layer in plan.layers)
    grouped = select(small_statistics(groups=2), SelectionOptions.parse(section | {"budget": {"prune": 0.5}}))
    assert all(sum(expert < 4 for expert in layer.kept) == 2 for layer in grouped.layers)
    section["solver"] = {"name": "swap", "certificate": True}
    bounded = select(small_statistics(experts=24, top_k=4), SelectionOptions.parse(section | {"budget": {"prune": 2}}))
    assert all(layer.bound is None or layer.bound <= layer.cost for layer in bounded.layers)


def test_slsqp_is_refused_early():
    with pytest.raises(InputError, match="slsqp needs a quadratic criterion, reroute is none"):
        SelectionOptions.parse({"criterion": "reroute", "solver": "slsqp"})
