"""Every family of the table, on a tiny real model: what is recorded is what the model computes.

A family is tested by being a row of the table; `pytest tests/models -k NAME` runs one.
"""

import numpy as np
import pytest
import torch

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.plan import LayerPlan, PrunePlan
from moeprune.models.families import FAMILIES, family_of
from moeprune.models.layers import find_moe_layers, model_fingerprint
from moeprune.models.pruned import pruned
from moeprune.recording.hooks import observed
from moeprune.recording.recorder import record
from tests.tiny import DENSE, NO_TEXT_ALONE, TINY, WRAPPERS, build, inputs
from tests.tokens import random_pieces, token_set

SUPPORTED = [name for name, row in FAMILIES.items() if row.verified]
# What a family's config can switch and recording has to follow.
VARIANTS = {
    "cohere2_moe": [
        {"shared_expert_combination_strategy": "sum", "expert_selection_fn": "sigmoid"},
        {"num_shared_experts": 0},
    ],
    "dbrx": [{"ffn_config": {**TINY["dbrx"].options["ffn_config"], "moe_normalize_expert_weights": None}}],
    "longcat_flash": [{"zero_expert_num": 0}],
    "nemotron_h": [{"moe_latent_size": None}, {"mlp_bias": True}],
}
CASES = [(name, {}) for name in (*SUPPORTED, *WRAPPERS) if name not in NO_TEXT_ALONE]
CASES += [(name, overrides) for name, variants in VARIANTS.items() for overrides in variants]
PIECES = random_pieces([40, 17, 33, 25, 64, 9])


def label(case):
    name, overrides = case
    return "-".join([name, *(f"{key}={value}" for key, value in overrides.items() if not isinstance(value, dict))])


@pytest.fixture(scope="module", params=CASES, ids=label)
def tiny(request):
    name, overrides = request.param
    return build(name, **overrides)


def test_every_verified_family_has_a_tiny_model():
    assert set(SUPPORTED) <= set(TINY)
    assert {name for row in FAMILIES.values() for name in row.inside} == set(WRAPPERS)


def test_every_row_is_verified_or_refused_with_a_reason():
    assert all(row.verified != bool(row.refused) for row in FAMILIES.values())


def test_what_is_found_is_what_the_config_says(tiny):
    layers = find_moe_layers(tiny)
    config = tiny.config.get_text_config()
    assert layers
    for layer in layers:
        assert layer.info.num_experts == 8
        section = getattr(config, layer.family.config_section) if layer.family.config_section else config
        assert layer.info.top_k == getattr(section, layer.family.top_k_key)
        assert tiny.get_submodule(layer.name) is layer.block


def test_statistics_do_not_depend_on_the_batch_size(tiny):
    # `record` itself raises when the parts do not rebuild the block or a routed slot is lost
    one, many = (record(tiny, token_set(PIECES), batch_tokens=size) for size in (1, 8192))
    for name, sums in one.domains["all"].items():
        other = many.domains["all"][name]
        np.testing.assert_array_equal(sums.co_count, other.co_count, err_msg=name)
        np.testing.assert_allclose(sums.norm_product, other.norm_product, rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(sums.output_product, other.output_product, rtol=1e-4, atol=1e-9, err_msg=name)
        assert int(sums.tokens) == sum(map(len, PIECES))


def test_recording_leaves_the_model_alone(tiny):
    batch = (
        inputs(tiny.config.model_type) if tiny.config.model_type in TINY else {"input_ids": torch.tensor(PIECES[:1])}
    )
    with torch.no_grad():
        before = tiny(**batch).logits
        with observed(find_moe_layers(tiny), lambda *_: None):
            during = tiny(**batch).logits
        after = tiny(**batch).logits
    torch.testing.assert_close(during, before, rtol=1e-4, atol=1e-4)
    assert torch.equal(after, before)


def test_the_gram_of_gated_outputs_is_the_error_of_dropping_experts(tiny):
    """z'Fz (product=outputs, all_tokens) == mean ||block with z dropped, no re-routing, minus block||^2, any z."""
    statistics = record(tiny, token_set(PIECES[:1]))
    dropped = np.array([1, 0, 1, 1, 0, 0, 1, 0], dtype=bool)
    for layer in find_moe_layers(tiny):
        sums = statistics.domains["all"][layer.name]
        gram = sums.output_product / int(sums.tokens) * layer.info.post_scale**2
        predicted = float(dropped @ gram @ dropped)
        measured = _measured_error(tiny, layer, dropped)
        assert predicted == pytest.approx(measured, rel=1e-3), layer.name


def _measured_error(model, layer, dropped):
    """At the block's output; before a norm of the sum where there is one, at the experts where there is no block."""
    outputs = []
    original = layer.experts.forward
    gone = torch.tensor([*dropped, *[False] * layer.extra])

    def without(x, index, weights):
        return original(x, index, weights.masked_fill(gone[index], 0))

    def without_inputs(x):  # of 0 comes 0
        return original(torch.where(gone.view(-1, 1, 1), 0, x.view(len(gone), -1, x.shape[-1])).view(x.shape))

    place = layer.experts if layer.family.bare else layer.block
    if layer.family.normalised_by:
        norm = getattr(layer.block, layer.family.normalised_by)
        handle = norm.register_forward_pre_hook(lambda module, args: outputs.append(args[0].detach().clone()))
    else:
        handle = place.register_forward_hook(lambda *call: outputs.append(_first(call[2]).detach().clone()))
    ids = torch.tensor(PIECES[:1])
    with torch.no_grad():
        model(input_ids=ids)
        layer.experts.forward = without_inputs if layer.info.gates_input else without
        model(input_ids=ids)
    del layer.experts.forward
    handle.remove()
    difference = (outputs[0] - outputs[1]).double().reshape(ids.numel(), -1)
    return float(difference.square().sum(-1).mean())


def _first(value):
    return value[0] if isinstance(value, tuple) else value


def test_pruned_equals_a_model_that_cannot_choose_the_pruned_experts(tiny):
    """The sliced semantics: softmax, groups and renormalisation run over the kept experts, and ids are mapped."""
    layers = find_moe_layers(tiny)
    plan = plan_for(tiny, layers)
    ids = torch.tensor(PIECES[:1])
    chosen = []

    def remember(layer, rows, index, gates, outputs):
        chosen.append((layer.name, index, gates))

    with torch.no_grad():
        before = tiny(input_ids=ids).logits
        with pruned(tiny, plan):
            inside = tiny(input_ids=ids).logits
            assert [layer.info.num_experts for layer in find_moe_layers(tiny)] == [6] * len(layers)
            with observed(find_moe_layers(tiny), remember):
                tiny(input_ids=ids)
        after = tiny(input_ids=ids).logits
    assert torch.equal(before, after)
    assert (inside - before).abs().max() > 1e-3
    nobody = {layer.name: int(layer.info.null_slots) for layer in layers}  # a number after the experts'
    for name, index, gates in chosen:
        assert int(index.max()) < len(plan.kept[name]) + nobody[name]
        assert torch.isfinite(gates).all()


def plan_for(model, layers):
    """Keeps the last three of each four experts, which every router's groups allow."""
    config = model.config
    return PrunePlan(
        model_type=config.model_type,
        model_fingerprint=model_fingerprint(model, layers),
        statistics_key="test",
        criterion={},
        solver={},
        budget={},
        mix={},
        layers=tuple(
            LayerPlan(
                name=layer.name,
                num_experts=layer.info.num_experts,
                top_k=layer.info.top_k,
                num_groups=layer.info.num_groups,
                kept=tuple(e for e in range(layer.info.num_experts) if e % 4 != 0),
            )
            for layer in layers
        ),
    )


def test_a_dense_model_is_refused_and_shown_the_way():
    with pytest.raises(InputError, match="moeprune compress"):
        find_moe_layers(build(next(iter(DENSE))))


def test_an_unknown_family_is_refused_with_the_list_of_supported_ones():
    with pytest.raises(InputError, match=r"'qwen9_moe' is not a supported.*qwen3_moe"):
        family_of("qwen9_moe")


def test_a_plan_for_another_model_is_refused():
    model, other = build("qwen3_moe", seed=1), build("qwen3_moe", seed=2)
    with pytest.raises(InputError, match="made for another model"):
        pruned(other, plan_for(model, find_moe_layers(model)))
