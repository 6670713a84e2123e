"""Models that accelerate spreads over devices give what they give in one place: recording, pruning, fidelity."""

import json

import numpy as np
import pytest
import torch

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.statistics import SUMS
from moeprune.evaluation.fidelity import fidelity
from moeprune.models.device_map import device_of_inputs, is_away, require_device_map
from moeprune.models.layers import find_moe_layers, model_fingerprint
from moeprune.models.loading import (
    load_model,
)
from moeprune.models.options import ModelOptions
from moeprune.models.pruned import pruned
from moeprune.recording.recorder import record
from tests.models.test_conformance import plan_for
from tests.tiny import save_tiny
from tests.tokens import random_pieces, token_set

PIECES = random_pieces([40, 17, 33, 25])
# One whose bias lies on the block, latent experts, experts in no block, gated inputs, a table by token.
FAMILIES = [
    "qwen3_moe",
    "deepseek_v3",
    "hy_v3",
    "nemotron_h",
    "gemma4_text",
    "llama4_text",
    "deepseek_v4",
    "zaya",
]


def half_on_disk(model):
    """Every second decoder layer is on disk, the last one among them; the rest stays in memory."""
    lists = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.ModuleList)}
    layers, found = max(lists.items(), key=lambda item: sum(p.numel() for p in item[1].parameters()))
    return {"": "cpu"} | {f"{layers}.{number}": "disk" for number in range(len(found) - 1, -1, -2)}


@pytest.fixture(scope="module", params=FAMILIES)
def places(request, tmp_path_factory):
    """(the model in memory, the same one with parts of it on disk)."""
    folder = tmp_path_factory.mktemp(request.param)
    options = ModelOptions(path=str(save_tiny(request.param, folder / "model")))
    here = load_model(options, device="cpu").model
    spread = load_model(
        options, device="cpu", device_map=half_on_disk(here), offload_folder=str(folder / "offload")
    ).model
    return here, spread


def test_parts_are_on_disk_and_inputs_go_where_the_model_begins(places):
    _, spread = places
    assert any(parameter.is_meta for parameter in spread.parameters())
    assert any(is_away(layer.experts) for layer in find_moe_layers(spread))
    assert device_of_inputs(spread) == torch.device("cpu")


def test_statistics_and_fingerprint_are_the_same(places):
    here, spread = places
    layers = [find_moe_layers(model) for model in places]
    assert model_fingerprint(here, layers[0]) == model_fingerprint(spread, layers[1])
    one, other = (record(model, token_set(PIECES), statistics="all") for model in places)
    for name, sums in one.domains["all"].items():
        for statistic in SUMS:
            ours, theirs = getattr(other.domains["all"][name], statistic), getattr(sums, statistic)
            np.testing.assert_array_equal(ours, theirs, err_msg=f"{name} {statistic}")


def test_pruned_is_the_same_and_the_whole_model_comes_back(places):
    here, spread = places
    plan = plan_for(here, find_moe_layers(here))
    ids = torch.tensor(PIECES[:1])
    with torch.no_grad():
        whole = here(input_ids=ids).logits
        assert torch.equal(spread(input_ids=ids).logits, whole)
        with pruned(here, plan):
            small = here(input_ids=ids).logits
        with pruned(spread, plan):
            assert torch.equal(spread(input_ids=ids).logits, small)
            assert {layer.info.num_experts for layer in find_moe_layers(spread)} == {6}
        assert torch.equal(spread(input_ids=ids).logits, whole)
    assert not torch.equal(whole, small)


def test_fidelity_is_the_same(places):
    here, spread = places
    plans = {"": plan_for(here, find_moe_layers(here))}
    assert fidelity(here, plans, token_set(PIECES)) == fidelity(spread, plans, token_set(PIECES))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return ModelOptions(path=str(save_tiny("qwen3_moe", tmp_path_factory.mktemp("tiny"))))


@pytest.mark.parametrize(
    ("device_map", "folder", "message"),
    [
        ({}, None, "names no module"),
        ({"": "disk"}, None, r"give runtime\.offload_folder"),
        ({"": 7}, None, "torch sees 0 GPUs, not 7"),
        ({"": "gpu"}, None, "'gpu' is no device"),
        ({"": "cpu", "model.layer.0": "cpu"}, None, r"no module 'model\.layer\.0'"),
        ({"model": "cpu"}, None, "no device for lm_head;"),
    ],
)
def test_a_map_that_cannot_work_is_refused_before_weights_are_read(tiny, device_map, folder, message):
    if torch.cuda.is_available() and "GPU" in message:
        pytest.skip("there are GPUs here")
    with pytest.raises(InputError, match=message):
        load_model(tiny, device="cpu", device_map=device_map, offload_folder=folder)


def test_tied_weights_are_not_parted(tmp_path):
    options = ModelOptions(path=str(save_tiny("qwen3_moe", tmp_path / "model", tie_word_embeddings=True)))
    arguments = {"device": "cpu", "offload_folder": str(tmp_path / "offload")}
    with pytest.raises(InputError, match=r"embed_tokens\.weight and lm_head\.weight are one tensor"):
        load_model(options, device_map={"": "cpu", "lm_head": "disk"}, **arguments)
    ids = torch.tensor(PIECES[:1])
    with torch.no_grad():
        expected = load_model(options, device="cpu").model(input_ids=ids).logits
        assert torch.equal(
            load_model(options, device_map={"": "disk"}, **arguments).model(input_ids=ids).logits, expected
        )


def test_weights_that_are_read_past_hooks_stay_on_a_device(tmp_path):
    options = ModelOptions(path=str(save_tiny("dbrx", tmp_path / "model")))
    here = load_model(options, device="cpu").model
    beside = {"": "disk", "transformer.blocks.0.ffn.experts": "cpu", "transformer.blocks.1.ffn.experts": "cpu"}
    with pytest.raises(InputError, match=r"blocks\.1\.ffn\.experts of dbrx must be on a device"):
        load_model(options, device="cpu", device_map=half_on_disk(here), offload_folder=str(tmp_path / "offload"))
    spread = load_model(options, device="cpu", device_map=beside, offload_folder=str(tmp_path / "offload")).model
    with torch.no_grad(), pruned(here, plan_for(here, find_moe_layers(here))):
        expected = here(input_ids=torch.tensor(PIECES[:1])).logits
    with torch.no_grad(), pruned(spread, plan_for(here, find_moe_layers(here))):
        assert torch.equal(spread(input_ids=torch.tensor(PIECES[:1])).logits, expected)


def test_a_file_is_no_offload_folder(tmp_path):
    (tmp_path / "file").write_text(json.dumps({}))
    with pytest.raises(InputError, match="is a file"):
        require_device_map({"": "disk"}, str(tmp_path / "file"))


def test_automatic_maps_work_where_there_is_one_device(tiny):
    model = load_model(tiny, device="cpu", device_map="auto").model
    assert device_of_inputs(model).type in ("cpu", "cuda")
    record(model, token_set(PIECES[:1]))
