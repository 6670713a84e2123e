"""What is not understood is refused before anything is written, with the tensor's or the layer's name."""

import json

import pytest
import torch
from safetensors.torch import save_file

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.statistics import Layer
from moeprune.checkpoint.audit import require_routable
from moeprune.checkpoint.inventory import inventory
from moeprune.checkpoint.prune import prune_checkpoint
from tests.checkpoint.sources import INDEX, add_shard, edit_config, plan_for, save_single, tensors_of
from tests.tiny import save_tiny


@pytest.fixture
def source(tmp_path):
    return save_tiny("qwen3_moe", tmp_path / "source", shard_size="40KB")


def refuses(tmp_path, source, match, plan=None, **options):
    with pytest.raises(InputError, match=match):
        prune_checkpoint(source, plan or plan_for(source), tmp_path / "out", **options)
    assert {path.name for path in tmp_path.iterdir()} <= {"source", "other"}


@pytest.mark.parametrize("name", ["model.layers.0.mlp.mystery", "model.layers.1.mlp.experts.3.mystery.weight"])
def test_an_unknown_tensor_in_a_block_with_an_axis_of_experts(name, source, tmp_path):
    add_shard(source, "extra.safetensors", {name: torch.ones(8, 4)})
    with pytest.raises(InputError, match=name):
        inventory(source)


def test_an_unknown_tensor_elsewhere_is_copied(source, tmp_path):
    plan = plan_for(source)
    add_shard(
        source,
        "extra.safetensors",
        {"model.rotary_emb.inv_freq": torch.ones(8), "model.layers.0.mlp.note": torch.ones(3)},
    )
    report = prune_checkpoint(source, plan, tmp_path / "out")
    assert torch.equal(tensors_of(tmp_path / "out")["model.rotary_emb.inv_freq"], torch.ones(8))
    assert report.audit.unused == ("model.layers.0.mlp.note",)  # the other is one transformers knows to ignore


def test_a_width_that_equals_the_number_of_experts_is_no_expert_axis(tmp_path):
    """Qwen3-Next has 512 experts of width 512, Qwen3-30B 128 experts and head size 128."""
    source = save_tiny(
        "qwen3_next", tmp_path / "source", moe_intermediate_size=8, shared_expert_intermediate_size=8, head_dim=8
    )
    prune_checkpoint(source, plan_for(source), tmp_path / "out")
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    assert before["model.layers.0.mlp.shared_expert.gate_proj.weight"].shape[0] == 8
    kept = [name for name in before if ".experts." not in name and "mlp.gate." not in name]
    assert all(torch.equal(before[name], after[name]) for name in kept)
    assert torch.equal(
        after["model.layers.1.mlp.experts.5.down_proj.weight"], before["model.layers.1.mlp.experts.7.down_proj.weight"]
    )


def test_pickled_checkpoints(source, tmp_path):
    plan = plan_for(source)
    for path in [*source.glob("*.safetensors"), source / INDEX]:
        path.unlink()
    torch.save({}, source / "pytorch_model.bin")
    refuses(tmp_path, source, r"pytorch_model\.bin", plan)


def test_a_directory_without_weights(source, tmp_path):
    plan = plan_for(source)
    for path in [*source.glob("*.safetensors"), source / INDEX]:
        path.unlink()
    refuses(tmp_path, source, r"model\.safetensors", plan)


def test_a_missing_file_of_the_index(source, tmp_path):
    plan = plan_for(source)
    gone = sorted(source.glob("*.safetensors"))[2]
    gone.unlink()
    refuses(tmp_path, source, gone.name, plan)


def test_an_index_that_does_not_fit_its_files(source, tmp_path):
    plan = plan_for(source)
    index = json.loads((source / INDEX).read_text())
    del index["weight_map"]["lm_head.weight"]
    (source / INDEX).write_text(json.dumps(index))
    refuses(tmp_path, source, r"lm_head\.weight", plan)


def test_a_tensor_in_two_files(source, tmp_path):
    plan = plan_for(source)
    add_shard(source, "extra.safetensors", {"model.norm.weight": torch.ones(32)})
    refuses(tmp_path, source, r"model\.norm\.weight", plan)


def test_an_expert_that_lacks_a_tensor(source, tmp_path):
    plan = plan_for(source)
    save_single(
        source, {n: t for n, t in tensors_of(source).items() if n != "model.layers.0.mlp.experts.3.up_proj.weight"}
    )
    refuses(tmp_path, source, r"model\.layers\.0\.mlp\.experts\.3\.up_proj\.weight", plan)


def test_more_experts_than_the_config_says(source, tmp_path):
    edit_config(source, num_experts=6)
    with pytest.raises(InputError, match=r"experts\.[67]\."):
        inventory(source)


def test_a_plan_for_another_model(source, tmp_path):
    other = save_tiny("qwen3_moe", tmp_path / "other", seed=1)
    refuses(tmp_path, source, "another model", plan_for(other))


def test_a_plan_with_unequal_counts_names_the_layers(source, tmp_path):
    plan = plan_for(source, {"model.layers.0.mlp": range(6), "model.layers.1.mlp": range(5)})
    refuses(tmp_path, source, r"5 in model\.layers\.1\.mlp; 6 in model\.layers\.0\.mlp", plan)


@pytest.mark.parametrize("method", ["bitsandbytes", "hqq", "quark"])
def test_quantisation_that_is_not_known(method, source, tmp_path):
    plan = plan_for(source)
    edit_config(source, quantization_config={"quant_method": method})
    refuses(tmp_path, source, method, plan)


@pytest.mark.parametrize(
    ("layer", "kept", "match"),
    [
        (Layer("b", 8, top_k=4), (0, 1, 2), "top_k=4"),
        (Layer("b", 8, top_k=1), (3,), "at least 2"),
        (Layer("b", 8, 2, num_groups=2, topk_group=1, group_minimum=2), (0, 1, 2, 4), "group"),
        (Layer("b", 8, 1, num_groups=4, topk_group=2, group_minimum=2), (0, 2, 4, 6), "whose score needs 2"),
        # topk_group * K / n_group < top_k: the router would silently pick experts that are masked out
        (Layer("b", 8, 4, num_groups=2, topk_group=1, group_minimum=2), (0, 1, 2, 4, 5, 6), "so 3 of 6"),
    ],
)
def test_a_router_that_could_not_route(layer, kept, match):
    with pytest.raises(InputError, match=match):
        require_routable(layer, kept)


def test_routers_that_can():
    require_routable(Layer("b", 8, 2, num_groups=2, topk_group=1, group_minimum=2), (0, 1, 4, 5))
    require_routable(Layer("b", 8, 4, num_groups=2, topk_group=2, group_minimum=2), (0, 1, 4, 5))


@pytest.mark.parametrize("where", [".", "inside", ".."])
def test_a_target_that_overlaps_the_source(where, source, tmp_path):
    with pytest.raises(InputError, match="source"):
        prune_checkpoint(source, plan_for(source), source / where, overwrite=True)


def test_a_target_that_is_a_file(source, tmp_path):
    (tmp_path / "other").write_text("x")
    with pytest.raises(InputError, match="is a file"):
        prune_checkpoint(source, plan_for(source), tmp_path / "other", overwrite=True)


def test_a_file_that_is_no_safetensors(source, tmp_path):
    plan = plan_for(source)
    path = sorted(source.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:100])
    refuses(tmp_path, source, path.name, plan)


def test_a_router_that_is_quantised(source, tmp_path):
    tensors = tensors_of(source)
    tensors["model.layers.0.mlp.gate.weight"] = tensors["model.layers.0.mlp.gate.weight"].to(torch.int8)
    save_single(source, tensors)
    with pytest.raises(InputError, match=r"model\.layers\.0\.mlp\.gate\.weight"):
        plan_for(source)


def test_a_dense_model(tmp_path):
    plan = plan_for(save_tiny("qwen3_moe", tmp_path / "other"))
    source = save_tiny("qwen3", tmp_path / "source", shard_size="40KB")
    refuses(tmp_path, source, "moeprune compress", plan)
    assert inventory(source).layers == ()
    assert {tensor.role for tensor in inventory(source).tensors} == {"other"}
    assert all(tensor.target == tensor.name for tensor in inventory(source).tensors)


def test_stray_weights_of_the_unpruned_model_are_left_out_and_named(source, tmp_path):
    plan = plan_for(source)
    save_file({"layers.0.w": torch.ones(8)}, source / "consolidated.safetensors")
    (source / "original").mkdir()
    (source / "original" / "model.gguf").write_bytes(b"x")
    (source / "speakers.pt").write_bytes(b"kept")
    report = prune_checkpoint(source, plan, tmp_path / "out")
    assert any("consolidated.safetensors, original/model.gguf" in warning for warning in report.warnings)
    assert (tmp_path / "out" / "speakers.pt").read_bytes() == b"kept"
    assert not (tmp_path / "out" / "consolidated.safetensors").exists()


def test_two_candidates_for_the_weights(source, tmp_path):
    plan = plan_for(source)
    save_file({"a": torch.ones(2)}, source / "model.safetensors")
    refuses(tmp_path, source, r"both model\.safetensors and", plan)
