"""Compressed checkpoints as stock transformers reads them back: equal numbers, zeros in place, nothing missing."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from moeprune.artifacts.errors import InputError
from moeprune.checkpoint.inventory import inventory
from moeprune.dense.export import Export
from moeprune.dense.methods.pruning import Magnitude, SparseGPT, Wanda
from moeprune.dense.methods.quantising import AWQ, FP8, GPTQ, NF4, RTN, Joint
from moeprune.dense.packed_layout import patterns
from moeprune.dense.reload import ReloadError, require_reloads
from moeprune.dense.walk import compress_model
from moeprune.dense.weights import look
from moeprune.models.loading import (
    load_model,
)
from moeprune.models.options import ModelOptions
from tests.dense.tokens import token_set
from tests.dense.written import same_names_inventory, write
from tests.tiny import save_tiny

pytest.importorskip("compressed_tensors")
ATTENTION, BOTH = ("attention",), ("attention", "routed_expert")
FEW = {"minimum_tokens": 1}
WAYS = {
    "zeros": [SparseGPT(pattern="2:4", targets=BOTH, **FEW)],
    "fp8 attention": [FP8(targets=ATTENTION)],
    "fp8 per tensor everywhere": [FP8(scale="tensor", targets=BOTH)],
    "int4 everywhere": [GPTQ(group_size=8, targets=BOTH, **FEW)],
    "int4 attention": [GPTQ(group_size=8, targets=ATTENTION, **FEW)],
    "int8 per row": [RTN(bits=8, group_size=None, targets=BOTH)],
    "int3": [RTN(bits=3, group_size=16, targets=BOTH)],
    "zeros, then two formats": [
        Wanda(pattern="2:4", targets=BOTH, **FEW),
        FP8(targets=ATTENTION),
        GPTQ(group_size=8, targets=("routed_expert",), **FEW),
    ],
    "fp8 experts, int4 attention": [FP8(targets=("routed_expert",)), RTN(group_size=16, targets=ATTENTION)],
    "joint": [Joint(pattern="2:4", group_size=8, targets=BOTH, **FEW)],
    "some layers": [RTN(group_size=8, targets=(r"re:layers\.1\.self_attn\.[qkv]_proj",))],
}


def exported(source, methods, target, *, layout="auto", dtype="float32"):
    """(model in memory, its report, the export) after writing `target`."""
    model = load_model(ModelOptions(path=str(source), dtype=dtype), device="cpu").model
    checkpoint = inventory(source)
    export = Export(checkpoint, model, methods, layout=layout)
    compressed = compress_model(model, methods, token_set(), dtype=export.dtype)
    write(checkpoint, export.edits(compressed), export.config_edits, target)
    return model, compressed.report, export


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save_tiny("qwen3_moe", tmp_path_factory.mktemp("source"), dtype="bfloat16", shard_size="40KB")


@pytest.mark.parametrize("way", WAYS)
def test_reload_gives_exactly_the_compressed_numbers(way, source, tmp_path):
    model, report, export = exported(source, WAYS[way], tmp_path / "out")
    reloaded = require_reloads(tmp_path / "out", model, report)
    assert reloaded.logits_distance < 1e-5
    fp8_linears = any(scheme.kind == "fp8" for name, scheme in export.schemes.items() if ".experts." not in name)
    assert (reloaded.rounded_distance > 1e-4) == fp8_linears
    assert reloaded.rounded_distance < 0.2
    if "zeros" in way or way == "joint":
        assert reloaded.sparsity >= 0.5
    before, after = (sum(f.stat().st_size for f in d.glob("*.safetensors")) for d in (source, tmp_path / "out"))
    assert (after < before) == bool(export.schemes)


@pytest.mark.parametrize("name", ["mixtral", "olmoe", "deepseek_v3", "glm4_moe", "qwen3_next"])
@pytest.mark.parametrize("packed", [False, True])
def test_families_with_their_own_names_on_disk(name, packed, tmp_path):
    roles = {"mixtral": BOTH, "olmoe": BOTH, "qwen3_next": (*BOTH, "shared_expert")}
    targets = roles.get(name, (*BOTH, "shared_expert", "dense_mlp"))
    methods = [Wanda(pattern="2:4", targets=targets, **FEW)]
    if packed:
        methods += [
            FP8(targets=tuple(t for t in targets if t != "routed_expert")),
            RTN(group_size=8, targets=("routed_expert",)),
        ]
    source = save_tiny(name, tmp_path / "source", dtype="bfloat16")
    model, report, _ = exported(source, methods, tmp_path / "out")
    assert require_reloads(tmp_path / "out", model, report).sparsity >= 0.5


def test_a_packed_checkpoint_generates(source, tmp_path):
    exported(source, WAYS["fp8 attention"], tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = model.generate(torch.arange(10, 20)[None], max_new_tokens=8, do_sample=False, min_new_tokens=8)
    assert ids.shape == (1, 18)


def test_everything_else_is_the_sources_to_the_byte(source, tmp_path):
    exported(source, WAYS["int4 attention"], tmp_path / "out")
    before, after = ({}, {})
    for tensors, directory in ((before, source), (after, tmp_path / "out")):
        for file in directory.glob("*.safetensors"):
            tensors |= load_file(file)
    kept = {name for name in before if "self_attn" not in name or "norm" in name}
    assert kept <= after.keys()
    assert all(torch.equal(before[name], after[name]) for name in kept)
    assert (source / "tokenizer.json").read_bytes() == (tmp_path / "out" / "tokenizer.json").read_bytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.pop("quantization_config")["format"] == "mixed-precision"  # int4, and the group that spares experts
    assert config == json.loads((source / "config.json").read_text())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == after.keys()


def test_a_dense_model_goes_the_same_way(tmp_path):
    source = save_tiny("qwen3", tmp_path / "source", dtype="bfloat16")
    methods = [SparseGPT(pattern="2:4", **FEW), GPTQ(group_size=16, **FEW)]
    model, report, _ = exported(source, methods, tmp_path / "out")
    reloaded = require_reloads(tmp_path / "out", model, report)
    assert reloaded.logits_distance < 1e-5
    assert reloaded.sparsity >= 0.5


def test_experts_fused_and_transposed_on_disk_are_found_by_value(tmp_path):
    source = save_tiny("gpt_oss", tmp_path / "source", dtype="bfloat16")
    model = load_model(ModelOptions(path=str(source), dtype="float32"), device="cpu").model
    checkpoint = same_names_inventory(source)
    methods = [Wanda(pattern="2:4", targets=BOTH, **FEW)]
    export = Export(checkpoint, model, methods)
    assert export.places["model.layers.0.mlp.experts.gate_up_proj"].flipped
    compressed = compress_model(model, methods, token_set(), dtype=export.dtype)
    write(checkpoint, export.edits(compressed), export.config_edits, tmp_path / "out")
    assert require_reloads(tmp_path / "out", model, compressed.report).sparsity >= 0.5
    fresh = load_model(ModelOptions(path=str(source), dtype="float32"), device="cpu").model
    with pytest.raises(InputError, match="holds all experts of a layer in one tensor"):
        Export(checkpoint, fresh, [RTN(group_size=8, targets=BOTH)])


def test_plain_layout_stores_rounded_numbers_of_any_method(source, tmp_path):
    methods = [
        AWQ(group_size=8, targets=ATTENTION, **FEW),
        GPTQ(symmetric=False, group_size=8, targets=("routed_expert",), **FEW),
    ]
    model, report, export = exported(source, methods, tmp_path / "out", layout="plain")
    assert not export.config_edits
    assert require_reloads(tmp_path / "out", model, report).logits_distance < 1e-5


def test_nf4_numbers_survive_the_quantiser_that_packs_them(source, tmp_path):
    model, report, export = exported(source, [NF4(targets=ATTENTION)], tmp_path / "out")
    require_reloads(tmp_path / "out", model, report)
    section = json.loads(export.texts["bitsandbytes.json"])
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert linears - set(section["llm_int8_skip_modules"]) == {
        w.name for w in look(model).weights if w.role == "attention"
    }
    from moeprune.dense.methods.inputs import InputStatistics

    for weight in look(model).weights:
        if weight.role == "attention":
            stored = weight.read()
            again = NF4().compress(stored, InputStatistics(weight.name, weight.shape[1], "nothing")).weight
            assert torch.equal(again.bfloat16(), stored.bfloat16())


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ([AWQ(group_size=8, **FEW)], "awq's input scales would have to be folded"),
        ([GPTQ(group_size=8, symmetric=False)], "gptq with symmetric: false cannot be packed"),
        ([RTN(group_size=8, targets=("re:q_proj",))], "self_attn: engines load q_proj, k_proj, v_proj as one"),
        (
            [RTN(group_size=8, targets=(r"re:layers\.0\..*experts",))],
            "transformers loads all routed experts by one scheme",
        ),
        ([NF4(targets=BOTH)], "is a routed expert, which it leaves alone silently"),
        ([NF4(targets=ATTENTION), RTN(group_size=8, targets=("routed_expert",))], "nf4 is packed by bitsandbytes when"),
        ([RTN(group_size=8), Magnitude(force=True)], "a forced magnitude after rtn cannot be packed"),
    ],
)
def test_combinations_that_load_wrong_are_refused_before_the_walk(methods, message, source):
    model = load_model(ModelOptions(path=str(source)), device="cpu").model
    with pytest.raises(InputError, match=message):
        Export(inventory(source), model, methods)


def test_a_weight_that_is_not_where_it_should_be_is_refused(source):
    model = load_model(ModelOptions(path=str(source)), device="cpu").model
    model.model.layers[1].self_attn.q_proj.weight.data[0, 0] += 1
    with pytest.raises(InputError, match=r"layers\.1\.self_attn\.q_proj\.weight: its numbers are not rows of"):
        Export(inventory(source), model, [Magnitude()])


def test_a_wrong_number_or_name_on_disk_is_noticed(source, tmp_path):
    model, report, _ = exported(source, WAYS["int4 attention"], tmp_path / "out")
    file = next(
        f
        for f in sorted((tmp_path / "out").glob("*.safetensors"))
        if any("v_proj.weight_scale" in k for k in load_file(f))
    )
    tensors = load_file(file)
    name = next(key for key in tensors if "v_proj.weight_scale" in key)
    save_file({**tensors, name: tensors[name] * 2}, file, metadata={"format": "pt"})
    with pytest.raises(ReloadError, match=r"v_proj differs by .* after reload"):
        require_reloads(tmp_path / "out", model, report)
    save_file({**tensors, "model.stray": torch.ones(1)}, file, metadata={"format": "pt"})
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.stray"] = file.name
    (tmp_path / "out" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ReloadError, match=r"1 unexpected keys on reload, first model\.stray"):
        require_reloads(tmp_path / "out", model, report)
    assert require_reloads(tmp_path / "out", model, report, unused={"model.stray"}).weights


def test_patterns_stand_for_exactly_the_names():
    universe = [f"model.layers.{i}.{m}" for i in range(12) for m in ("attn.q", "mlp.shared_experts.up")] + [
        "vision.layers.0.attn.q"
    ]
    assert patterns([n for n in universe if n.endswith("attn.q") and n.startswith("model")], universe) == [
        r"re:^model\.layers\.\d+\.attn\.q$"
    ]
    assert patterns(["model.layers.3.attn.q"], universe) == ["model.layers.3.attn.q"]
    (shared,) = patterns([n for n in universe if "shared" in n], universe)
    assert "experts" not in shared  # transformers would take it for the routed ones
