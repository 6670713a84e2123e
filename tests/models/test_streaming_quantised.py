"""Quantised checkpoints are read layer by layer as a plain load reads them: here, on a CPU, widened."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeprune.models.loading import (
    load_model,
)
from moeprune.models.options import ModelOptions
from moeprune.models.streaming import conversion
from moeprune.models.streaming.model import open_streamed
from moeprune.models.streaming.passes import LayerMajor
from tests.tiny import inputs, save_tiny

SIZES = {
    "fp8": {"hidden_size": 128, "moe_intermediate_size": 128},
    "mxfp4": {"hidden_size": 64, "intermediate_size": 64},
}


def as_fp8(name, weight):
    """8-bit floats with one scale for each block of 128 x 128."""
    if not name.endswith("_proj.weight"):
        return {name: weight}
    scale = weight.float().abs().max() / 448
    blocks = [-(-size // 128) for size in weight.shape]
    quantised = (weight.float() / scale).to(torch.float8_e4m3fn)
    return {name: quantised, f"{name}_scale_inv": scale.expand(blocks).contiguous()}


def as_mxfp4(name, weight):
    """Two 4-bit floats a byte, and an exponent for 32 of them; any bytes are numbers."""
    if ".experts." not in name or not name.endswith(("gate_up_proj", "down_proj")):
        return {name: weight}
    experts, into, out = weight.shape
    generator = torch.Generator().manual_seed(into)
    shape = (experts, out, into // 32)
    blocks = torch.randint(0, 255, (*shape, 16), dtype=torch.uint8, generator=generator)
    return {
        f"{name}_blocks": blocks,
        f"{name}_scales": torch.randint(120, 124, shape, dtype=torch.uint8, generator=generator),
    }


@pytest.fixture(params=["fp8", "mxfp4"])
def source(request, tmp_path):
    method = request.param
    family = {"fp8": "qwen3_moe", "mxfp4": "gpt_oss"}[method]
    directory = Path(save_tiny(family, tmp_path / "model", dtype="bfloat16", **SIZES[method]))
    change = {"fp8": as_fp8, "mxfp4": as_mxfp4}[method]
    tensors = load_file(directory / "model.safetensors")
    changed = {name: value for old, weight in tensors.items() for name, value in change(old, weight).items()}
    save_file(changed, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method} | (
        {"weight_block_size": [128, 128], "activation_scheme": "dynamic"} if method == "fp8" else {}
    )
    (directory / "config.json").write_text(json.dumps(config))
    return family, directory


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_logits_are_those_of_a_plain_load(source, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(conversion, "BLOCK", 10_000)
    family, directory = source
    options, batch = ModelOptions(path=str(directory), dtype=dtype), inputs(family)
    model = load_model(options, device="cpu").model
    with torch.no_grad():
        expected = model(**batch, use_cache=False).logits
    streamed = open_streamed(options, device="cpu")
    assert streamed.model.dtype == model.dtype

    def forward():
        return streamed.model(**batch, use_cache=False).logits

    with LayerMajor(streamed, [forward], scratch=tmp_path) as passes:
        for _ in passes.layers():
            passes.advance(0)
        assert torch.equal(passes.finish(0), expected)


def test_packed_weights_are_unpacked_layer_by_layer(tmp_path):
    """compressed-tensors would unpack the whole model at its first forward pass; a streamed one has never all of it."""
    pytest.importorskip("compressed_tensors")
    from moeprune.dense.compress import compress_checkpoint
    from moeprune.dense.methods.quantising import RTN

    source = save_tiny("qwen3_moe", tmp_path / "source", dtype="bfloat16", num_hidden_layers=3)
    methods = [RTN(group_size=8, targets=("attention", "routed_expert"))]
    compress_checkpoint(Path(source), tmp_path / "packed", methods, None, device="cpu")
    options, batch = ModelOptions(path=str(tmp_path / "packed"), dtype="bfloat16"), inputs("qwen3_moe")
    with torch.no_grad():
        expected = load_model(options, device="cpu").model(**batch, use_cache=False).logits
    streamed = open_streamed(options, device="cpu")
    packed = streamed.model.model.layers[0].self_attn.q_proj
    names = list(packed._parameters)
    with LayerMajor(streamed, [lambda: streamed.model(**batch, use_cache=False).logits], scratch=tmp_path) as passes:
        for position in passes.layers():
            assert hasattr(packed, "weight") == (position == 0)
            passes.advance(0)
        assert torch.equal(passes.finish(0), expected)
    assert list(packed._parameters) == names
    assert all(tensor is None or tensor.is_meta for tensor in packed._parameters.values())
