"""Statistics of the public HOPE code on two tiny models, recomputed by ours: counts equal, sums to 1e-5 relative."""

import json
from pathlib import Path

import numpy as np
import pytest

from moeprune.artifacts.plan import LayerPlan, PrunePlan
from moeprune.data.options import Domain, Intake
from moeprune.data.trajectories import load_tokens
from moeprune.models.loading import (
    load_model,
)
from moeprune.models.options import ModelOptions
from moeprune.models.pruned import pruned
from moeprune.recording.recorder import record

HERE = Path(__file__).parent / "oracles"
STATISTICS = Path(__file__).parents[1] / "selection" / "oracles"
SUMS = {
    "norm_prod_sums": "norm_product",
    "gate_sums": "gate_sum",
    "norm_sums": "norm_sum",
    "norm_square_sums": "norm_square_sum",
    "gate_norm_sums": "gated_norm_sum",
}


@pytest.fixture(scope="module", params=["qwen3moe", "glm4moe"])
def case(request, tmp_path_factory):
    folder = HERE / request.param
    data = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    prompts = json.loads((folder / "prompts.json").read_text())
    data.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in prompts))
    loaded = load_model(ModelOptions(path=str(folder / "model")), device="cpu")
    tokens = load_tokens([Domain(name="all", path=str(data))], loaded.tokenizer, Intake(sequence_length=4096))
    theirs = np.load(next(STATISTICS.glob(f"{request.param}*/statistics.npz")))
    return loaded.model, record(loaded.model, tokens), theirs, folder


def test_counts_are_equal_and_sums_agree(case):
    _, statistics, theirs, _ = case
    for ordinal, (name, ours) in enumerate(statistics.domains["all"].items()):
        prefix = f"layer_{ordinal}/"
        assert int(ours.tokens) == int(theirs[prefix + "total_tokens"]) == 2031, name
        np.testing.assert_array_equal(ours.co_count, theirs[prefix + "coselect_counts"])
        for their_name, our_name in SUMS.items():
            np.testing.assert_allclose(
                getattr(ours, our_name), theirs[prefix + their_name], rtol=1e-5, err_msg=our_name
            )
        diagonal = np.diagonal(ours.norm_product)
        np.testing.assert_allclose(diagonal, theirs[prefix + "gate_norm_square_sums"], rtol=1e-5)


def test_pruned_in_memory_gives_the_logits_of_their_sliced_model(case):
    import torch

    model, statistics, _, folder = case
    sets = json.loads(next(STATISTICS.glob(f"{folder.name}*/prune_sets.json")).read_text())["hope_0p5"]
    layers = [
        LayerPlan(
            name=layer.name,
            num_experts=layer.num_experts,
            top_k=layer.top_k,
            num_groups=layer.num_groups,
            kept=tuple(e for e in range(layer.num_experts) if e not in sets[str(ordinal)]),
        )
        for ordinal, layer in enumerate(statistics.layers)
    ]
    plan = PrunePlan(
        model_type=model.config.model_type,
        model_fingerprint=statistics.fingerprint,
        statistics_key="",
        criterion={},
        solver={},
        budget={},
        mix={},
        layers=tuple(layers),
    )
    ids = torch.tensor(json.loads((folder / "heldout.json").read_text()))
    with torch.no_grad():
        whole = model(ids).logits.numpy()
        with pruned(model, plan):
            sliced = model(ids).logits.numpy()
        again = model(ids).logits.numpy()
    np.testing.assert_allclose(whole, np.load(folder / "logits_full.npy"), atol=2e-5)
    np.testing.assert_allclose(sliced, np.load(folder / "logits_pruned_hope_0p5.npy"), atol=2e-5)
    np.testing.assert_array_equal(again, whole)
