"""A pruned checkpoint on disk is the model pruned in memory, in the source's own layout."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from moeprune.checkpoint.audit import logits_difference
from moeprune.checkpoint.inventory import checkpoint_fingerprint, inventory
from moeprune.checkpoint.prune import prune_checkpoint
from moeprune.models.layers import find_moe_layers, model_fingerprint
from moeprune.models.pruned import pruned
from tests.checkpoint.sources import CORE, INDEX, KEPT, contents, files, plan_for, save_single, tensors_of
from tests.tiny import inputs, save_tiny

LAYOUTS = [("bfloat16", "40KB"), ("float32", None), ("float16", None)]


def logits(model, name):
    with torch.no_grad():
        return model(**inputs(name)).logits


def load(directory, dtype=torch.float32):
    model, info = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def renumbered(name, kept=KEPT):
    """The name after pruning, None for an expert that is gone; written anew, not taken from the code under test."""
    parts = name.split(".")
    if "experts" in parts and parts[parts.index("experts") + 1].isdigit():
        at = parts.index("experts") + 1
        expert = int(parts[at])
        if expert not in kept:
            return None
        parts[at] = str(kept.index(expert))
    return ".".join(parts)


@pytest.mark.parametrize(("dtype", "shard_size"), LAYOUTS)
@pytest.mark.parametrize("name", CORE)
def test_reloading_gives_the_model_pruned_in_memory(name, dtype, shard_size, tmp_path):
    source = save_tiny(name, tmp_path / "source", dtype=dtype, shard_size=shard_size)
    plan = plan_for(source)
    report = prune_checkpoint(source, plan, tmp_path / "out")
    base = load(source)
    layers = find_moe_layers(base)
    assert plan.model_fingerprint == model_fingerprint(base, layers)
    with pruned(base, plan):
        expected = logits(base, name)
        assert not torch.equal(expected, logits(load(source), name))
        ids = inputs(name)["input_ids"]
        assert logits_difference(tmp_path / "out", lambda ids: base(input_ids=ids).logits, ids) == 0
    result = load(tmp_path / "out")
    assert torch.equal(logits(result, name), expected)
    assert report.fingerprint == model_fingerprint(result, find_moe_layers(result))
    assert [layer.info.num_experts for layer in find_moe_layers(result)] == [len(KEPT)] * len(layers)
    assert report.audit.reload == "strict"
    assert report.audit.unused == ()
    assert report.warnings == ()


@pytest.mark.parametrize("shard_size", ["40KB", None])
@pytest.mark.parametrize("name", CORE)
def test_names_files_and_bytes_are_those_of_the_source(name, shard_size, tmp_path):
    source, out = save_tiny(name, tmp_path / "source", dtype="bfloat16", shard_size=shard_size), tmp_path / "out"
    report = prune_checkpoint(source, plan_for(source), out)
    before, after = contents(source), contents(out)
    routers = {tensor.name for tensor in inventory(source).tensors if tensor.role == "router"}
    expected = {}
    for old, (dtype, shape, data) in before.items():
        new = renumbered(old)
        if old in routers:
            row = len(data) // 8
            data = b"".join(data[expert * row : (expert + 1) * row] for expert in KEPT)
            shape = (len(KEPT), *shape[1:])
        if new is not None:
            expected[new] = (dtype, shape, data)
    assert after == expected
    assert {p.name for p in out.glob("*.safetensors")} == {p.name for p in source.glob("*.safetensors")}
    assert (out / INDEX).exists() == (source / INDEX).exists() == (shard_size is not None)
    assert report.bytes == sum(len(data) for _, _, data in after.values())
    assert report.parameters == sum(tensor.numel() for tensor in tensors_of(out).values())
    assert report.bytes_base == sum(len(data) for _, _, data in before.values())


@pytest.mark.parametrize("name", CORE)
def test_only_the_counts_of_config_json_change(name, tmp_path):
    source, out = save_tiny(name, tmp_path / "source"), tmp_path / "out"
    prune_checkpoint(source, plan_for(source), out)
    before, after = (path.joinpath("config.json").read_text().splitlines() for path in (source, out))
    changed = [(old.strip(), new.strip()) for old, new in zip(before, after, strict=True) if old != new]
    key = {"mixtral": "num_local_experts", "deepseek_v3": "n_routed_experts", "glm4_moe": "n_routed_experts"}
    key = key.get(name, "num_experts")
    assert changed == [(f'"{key}": 8,', f'"{key}": 6,')]


def test_the_index_names_exactly_what_is_there(tmp_path):
    source, out = save_tiny("qwen3_moe", tmp_path / "source", shard_size="40KB"), tmp_path / "out"
    prune_checkpoint(source, plan_for(source), out)
    index = json.loads((out / INDEX).read_text())
    where = {name: path.name for path in out.glob("*.safetensors") for name in tensors_of_file(path)}
    assert index["weight_map"] == where
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in contents(out).values())
    assert index["metadata"].keys() == json.loads((source / INDEX).read_text())["metadata"].keys()


def tensors_of_file(path):
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return list(file.keys())


@pytest.mark.parametrize("name", CORE)
def test_a_source_with_fused_experts_stays_fused(name, tmp_path):
    """The layout in memory, written to disk as it is: the other way round from per-expert files (R10)."""
    source = save_tiny(name, tmp_path / "source", dtype="float32")
    save_single(source, {n: t.contiguous() for n, t in load(source).state_dict().items()})
    plan = plan_for(source)
    prune_checkpoint(source, plan, tmp_path / "out")
    assert set(contents(tmp_path / "out")) == set(contents(source))
    base = load(source)
    with pruned(base, plan):
        expected = logits(base, name)
    assert torch.equal(logits(load(tmp_path / "out"), name), expected)


def test_different_experts_in_every_layer(tmp_path):
    source = save_tiny("qwen3_moe", tmp_path / "source", num_hidden_layers=4)
    kept = {f"model.layers.{i}.mlp": sorted({(i + j) % 8 for j in range(5)}) for i in range(4)}
    plan = plan_for(source, kept)
    prune_checkpoint(source, plan, tmp_path / "out")
    base = load(source)
    with pruned(base, plan):
        expected = logits(base, "qwen3_moe")
    assert torch.equal(logits(load(tmp_path / "out"), "qwen3_moe"), expected)


def test_pruning_twice_is_pruning_once(tmp_path):
    source = save_tiny("olmoe", tmp_path / "source", shard_size="40KB")
    prune_checkpoint(source, plan_for(source, (0, 2, 3, 5, 6, 7)), tmp_path / "first")
    prune_checkpoint(tmp_path / "first", plan_for(tmp_path / "first", (0, 2, 5)), tmp_path / "second")
    prune_checkpoint(source, plan_for(source, (0, 3, 7)), tmp_path / "once")
    assert contents(tmp_path / "second") == contents(tmp_path / "once")
    record = json.loads((tmp_path / "second" / "moeprune.json").read_text())
    assert record["base_model"]["moeprune"]["plan"] == plan_for(source).model_dump(mode="json")


def test_the_same_call_writes_the_same_bytes(tmp_path):
    source = save_tiny("mixtral", tmp_path / "source", shard_size="40KB")
    for name in ("a", "b"):
        prune_checkpoint(source, plan_for(source), tmp_path / name)
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_a_dry_run_says_the_same_and_writes_nothing(tmp_path):
    source = save_tiny("qwen3_moe", tmp_path / "source", shard_size="40KB")
    plan = plan_for(source)
    dry = prune_checkpoint(source, plan, tmp_path / "out", dry_run=True)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    real = prune_checkpoint(source, plan, tmp_path / "out")
    same = ("layers", "parameters", "parameters_base", "bytes", "bytes_base", "shards", "copied", "mtp", "warnings")
    assert all(getattr(dry, field) == getattr(real, field) for field in same)
    assert dry.audit is None


def test_progress_ends_at_the_total(tmp_path):
    source = save_tiny("qwen3_moe", tmp_path / "source", shard_size="40KB")
    seen = []
    prune_checkpoint(
        source, plan_for(source), tmp_path / "out", on_progress=lambda done, total: seen.append((done, total))
    )
    total = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_checkpoint_fingerprint_does_not_depend_on_the_layout(tmp_path):
    single = save_tiny("deepseek_v3", tmp_path / "single", dtype="bfloat16")
    sharded = save_tiny("deepseek_v3", tmp_path / "sharded", dtype="bfloat16", shard_size="20KB")
    other = save_tiny("deepseek_v3", tmp_path / "other", dtype="bfloat16", seed=1)
    prints = [checkpoint_fingerprint(inventory(path)) for path in (single, sharded, other)]
    assert prints[0] == prints[1] != prints[2]
