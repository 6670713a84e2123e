"""Quantised sources: parts go with their weight, types and bytes of kept experts stay, module lists follow (R33)."""

import json

import pytest
import torch

from moeprune.artifacts.errors import InputError
from moeprune.checkpoint.inventory import inventory
from moeprune.checkpoint.prune import prune_checkpoint
from tests.checkpoint.sources import KEPT, contents, edit_config, plan_for, save_single, tensors_of
from tests.tiny import save_tiny

EXPERT = "model.layers.{}.mlp.experts.{}.{}"


def filled(*shape, dtype, seed):
    """Random bytes as a tensor of any type: what they mean is not looked at."""
    generator = torch.Generator().manual_seed(seed)
    width = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 127, (*shape[:-1], shape[-1] * width), dtype=torch.uint8, generator=generator).view(dtype)


# What each format stores in place of a weight (out, in): suffix -> shape and type.
FORMATS = {
    "fp8": lambda out, into: {
        "weight": ((out, into), torch.float8_e4m3fn),
        "weight_scale_inv": ((1, 1), torch.float32),
    },
    "compressed-tensors": lambda out, into: {
        "weight_packed": ((out, into // 8), torch.int32),
        "weight_scale": ((out, into // 8), torch.bfloat16),
        "weight_shape": ((2,), torch.int64),
    },
    "modelopt": lambda out, into: {
        "weight": ((out, into // 2), torch.uint8),
        "weight_scale": ((out, into // 16), torch.float8_e4m3fn),
        "weight_scale_2": ((1,), torch.float32),
        "input_scale": ((1,), torch.float32),
    },
    "gptq": lambda out, into: {
        "qweight": ((into // 8, out), torch.int32),
        "qzeros": ((1, out // 8), torch.int32),
        "scales": ((1, out), torch.float16),
        "g_idx": ((into,), torch.int32),
    },
    "awq": lambda out, into: {
        "qweight": ((into, out // 8), torch.int32),
        "qzeros": ((1, out // 8), torch.int32),
        "scales": ((1, out), torch.float16),
    },
}


def quantised(tensors, method):
    """The linear weights in another format; routers, embeddings, norms and the head stay."""
    result = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and module.endswith(("_proj", ".w1", ".w2", ".w3")):
            for suffix, (shape, dtype) in FORMATS[method](*tensor.shape).items():
                result[f"{module}.{suffix}"] = filled(*shape, dtype=dtype, seed=number)
        else:
            result[name] = tensor
    return result


@pytest.mark.parametrize("method", FORMATS)
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_every_part_goes_with_its_weight(name, method, tmp_path):
    source = save_tiny(name, tmp_path / "source", dtype="bfloat16")
    prints = plan_for(source).model_fingerprint
    save_single(source, quantised(tensors_of(source), method))
    edit_config(source, quantization_config={"quant_method": method})
    plan = plan_for(source)
    assert plan.model_fingerprint == prints  # a plan made on the bf16 checkpoint fits its quantised sibling
    report = prune_checkpoint(source, plan, tmp_path / "out")
    before, after = contents(source), contents(tmp_path / "out")
    layers = {layer.name: layer for layer in inventory(source).layers}
    experts = {n for n in before if ".experts." in n}
    assert len(experts) == len(layers) * 8 * 3 * len(FORMATS[method](16, 32))
    for number, old in enumerate(KEPT):
        for n in (n for n in before if f".experts.{old}." in n):
            assert after[n.replace(f".experts.{old}.", f".experts.{number}.")] == before[n]
    assert len(after) == len(before) - len(experts) * 2 // 8
    assert report.audit.reload.startswith("left out")
    assert 0 < report.parameters < report.parameters_base


def test_parameters_of_packed_weights_are_those_of_the_model(tmp_path):
    plain = save_tiny("qwen3_moe", tmp_path / "plain", dtype="bfloat16")
    packed = save_tiny("qwen3_moe", tmp_path / "packed", dtype="bfloat16")
    save_single(packed, quantised(tensors_of(packed), "compressed-tensors"))
    edit_config(packed, quantization_config={"quant_method": "compressed-tensors"})
    reports = [prune_checkpoint(path, plan_for(path), tmp_path / "out", dry_run=True) for path in (plain, packed)]
    assert reports[0].parameters == reports[1].parameters
    assert reports[0].parameters_base == reports[1].parameters_base
    assert reports[0].bytes > reports[1].bytes


def with_ignored(tmp_path, modules):
    source = save_tiny("qwen3_moe", tmp_path / "source", dtype="bfloat16")
    edit_config(source, quantization_config={"quant_method": "fp8", "modules_to_not_convert": modules})
    return source


def test_lists_of_modules_are_renumbered(tmp_path):
    kept = {"model.layers.0.mlp": KEPT, "model.layers.1.mlp": (0, 1, 2, 3, 4, 7)}
    modules = ["lm_head", "re:.*gate$", "re:.*experts\\.\\d+\\.down_proj", "model.layers.0.mlp.experts"]
    experts = [
        EXPERT.format(0, 7, "up_proj"),
        EXPERT.format(0, 1, "up_proj"),
        EXPERT.format(1, 7, "up_proj"),
        "model.layers.1.mlp.experts.4",
    ]
    source = with_ignored(tmp_path, modules + experts)
    (source / "hf_quant_config.json").write_text(json.dumps({"quantization": {"exclude_modules": experts[:2]}}))
    (source / "quantize_config.json").write_text('{"bits":4}')
    prune_checkpoint(source, plan_for(source, kept), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "fp8",
        "modules_to_not_convert": [
            *modules,
            EXPERT.format(0, 5, "up_proj"),
            EXPERT.format(1, 5, "up_proj"),
            "model.layers.1.mlp.experts.4",
        ],
    }
    other = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    assert other == {"quantization": {"exclude_modules": [EXPERT.format(0, 5, "up_proj")]}}
    assert (tmp_path / "out" / "quantize_config.json").read_text() == '{"bits":4}'


def test_tables_of_modules_are_renumbered(tmp_path):
    source = save_tiny("qwen3_moe", tmp_path / "source", dtype="bfloat16")
    table = {
        EXPERT.format(0, 1, "up_proj"): {"bits": 8},
        EXPERT.format(0, 2, "up_proj"): {"bits": 2},
        "lm_head": {"bits": 16},
    }
    edit_config(source, quantization_config={"quant_method": "auto-round", "bits": 4, "extra_config": table})
    prune_checkpoint(source, plan_for(source), tmp_path / "out")
    found = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert found == {
        "quant_method": "auto-round",
        "bits": 4,
        "extra_config": {EXPERT.format(0, 1, "up_proj"): {"bits": 2}, "lm_head": {"bits": 16}},
    }


@pytest.mark.parametrize(
    "module", ["re:.*experts\\.7\\..*", "experts.7.up_proj", "model.layers.9.mlp.experts.7.up_proj"]
)
def test_an_expert_that_cannot_be_placed_is_refused(module, tmp_path):
    source = with_ignored(tmp_path, ["lm_head", module])
    with pytest.raises(InputError, match="quantization_config names"):
        prune_checkpoint(source, plan_for(source), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_scales_that_span_experts_are_refused(tmp_path):
    """Block scales of 128 x 128 over a router of 8 rows: one scale for many experts."""
    source = save_tiny("qwen3_moe", tmp_path / "source", dtype="bfloat16")
    save_single(source, tensors_of(source) | {"model.layers.0.mlp.gate.weight_scale_inv": torch.ones(2, 2)})
    edit_config(source, quantization_config={"quant_method": "fp8"})
    with pytest.raises(InputError, match=r"model\.layers\.0\.mlp\.gate\.weight_scale_inv"):
        inventory(source)


def test_fused_experts_with_scales(tmp_path):
    source = save_tiny("qwen3_moe", tmp_path / "source", dtype="bfloat16")
    tensors = {n: t for n, t in tensors_of(source).items() if ".experts." not in n}
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts."
        tensors |= {
            experts + "gate_up_proj": filled(8, 32, 32, dtype=torch.float8_e4m3fn, seed=1),
            experts + "gate_up_proj_scale_inv": filled(8, 1, 1, dtype=torch.float32, seed=2),
            experts + "down_proj_blocks": filled(8, 32, 1, 16, dtype=torch.uint8, seed=3),
            experts + "down_proj_scales": filled(8, 32, 1, dtype=torch.uint8, seed=4),
            experts + "down_proj_input_scale": torch.ones(1),
        }
    save_single(source, tensors)
    edit_config(source, quantization_config={"quant_method": "fp8"})
    prune_checkpoint(source, plan_for(source), tmp_path / "out")
    after = tensors_of(tmp_path / "out")
    for name, tensor in tensors.items():
        cut = ".mlp.gate." in name or (".experts." in name and "input_scale" not in name)
        expected = tensor.view(torch.uint8)[list(KEPT)] if cut else tensor.view(torch.uint8)
        assert torch.equal(after[name].view(torch.uint8), expected), name
        assert after[name].dtype == tensor.dtype


def test_quantised_experts_that_nothing_speaks_of(tmp_path):
    source = save_tiny("qwen3_moe", tmp_path / "source", dtype="bfloat16")
    plan = plan_for(source)
    save_single(source, quantised(tensors_of(source), "modelopt"))
    with pytest.raises(InputError, match=r"experts\.0\..*no quantization_config"):
        inventory(source)
    (source / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    report = prune_checkpoint(source, plan, tmp_path / "out")
    assert "modelopt" in report.audit.reload


def test_mxfp4_experts(tmp_path):
    """As gpt-oss is published: blocks and scales of fused experts, biases in bf16, module lists without numbers."""
    source = save_tiny("gpt_oss", tmp_path / "source", dtype="bfloat16")
    tensors = tensors_of(source)
    for layer in range(2):
        for name, rows, columns in (("gate_up_proj", 96, 32), ("down_proj", 32, 64)):
            del tensors[f"model.layers.{layer}.mlp.experts.{name}"]
            fused = f"model.layers.{layer}.mlp.experts.{name}"
            tensors[f"{fused}_blocks"] = filled(8, rows, columns // 32, 16, dtype=torch.uint8, seed=layer)
            tensors[f"{fused}_scales"] = filled(8, rows, columns // 32, dtype=torch.uint8, seed=layer + 9)
    save_single(source, tensors)
    ignored = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    edit_config(source, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ignored})
    prune_checkpoint(source, plan_for(source), tmp_path / "out")
    after = tensors_of(tmp_path / "out")
    assert after.keys() == tensors.keys()
    for name, tensor in tensors.items():
        cut = ".experts." in name or ".router." in name
        assert torch.equal(after[name], tensor[list(KEPT)] if cut else tensor), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["modules_to_not_convert"] == ignored
