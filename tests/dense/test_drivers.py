"""The walk with one block in memory against the walk with all of them: same bits, killed or not, little memory."""

from functools import partial

import pytest
import torch
from safetensors import safe_open

from moeprune.artifacts.safetensors_files import read_header
from moeprune.checkpoint.inventory import inventory
from moeprune.dense.drivers import compress_streamed, foreseen_export
from moeprune.dense.export import Export
from moeprune.dense.methods.pruning import Magnitude, SparseGPT, Wanda
from moeprune.dense.methods.quantising import FP8, GPTQ, RTN, Joint
from moeprune.dense.reload import ReloadError, require_reloads, require_reloads_streamed
from moeprune.dense.walk import compress_model
from moeprune.models.loading import (
    load_model,
)
from moeprune.models.options import ModelOptions
from moeprune.models.streaming.model import open_streamed
from tests.dense.tokens import token_set
from tests.dense.written import write
from tests.tiny import save_tiny

BOTH = ("attention", "routed_expert")
FEW = {"minimum_tokens": 1}
WAYS = {
    "zeros": [SparseGPT(pattern="2:4", targets=BOTH, **FEW)],
    "zeros, then two formats": [
        Wanda(pattern="2:4", targets=BOTH, **FEW),
        FP8(targets=("attention",)),
        GPTQ(group_size=8, targets=("routed_expert",), **FEW),
    ],
    "no data": [Magnitude(targets=BOTH), RTN(group_size=8, targets=("routed_expert",))],
    "some experts": [Joint(pattern="2:4", group_size=8, targets=(r"re:layers\.1\..*experts\.[02]\.",), **FEW)],
}


def in_memory(source, methods, dtype="auto", batch_tokens=64):
    model = load_model(ModelOptions(path=str(source), dtype=dtype), device="cpu").model
    export = Export(inventory(source), model, methods, layout="plain")
    return export, compress_model(model, methods, token_set(), dtype=export.dtype, batch_tokens=batch_tokens)


def streamed(source, methods, state, *, layout="plain", dtype="auto", **options):
    model = open_streamed(ModelOptions(path=str(source), dtype=dtype), device="cpu")
    export = foreseen_export(model, inventory(source), methods, layout=layout)
    return export, compress_streamed(model, export, methods, token_set(), state=state, batch_tokens=64, **options)


def written(export, compressed):
    edits = export.edits(compressed)
    return {new.name: bytes(new.data()) for edit in edits.values() for new in edit.tensors}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3", "granitemoe"])
def test_the_same_bytes_as_in_memory(family, way, tmp_path):
    source, methods = save_tiny(family, tmp_path / "source", dtype="bfloat16"), WAYS[way]
    expected = in_memory(source, methods)
    found = streamed(source, methods, tmp_path / "state")
    assert found[1].report == expected[1].report
    assert written(*found) == written(*expected)
    assert found[1].quantised.keys() == expected[1].quantised.keys()


PACKED = {
    "fp8 attention": [FP8(targets=("attention",))],
    "fp8 per tensor everywhere": [FP8(scale="tensor", targets=BOTH)],
    "int4 everywhere": [GPTQ(group_size=8, targets=BOTH, **FEW)],
    "zeros": WAYS["zeros"],
    "zeros, then two formats": WAYS["zeros, then two formats"],
}


@pytest.mark.parametrize("way", PACKED)
def test_the_reload_is_compared_layer_by_layer(way, tmp_path):
    if way != "zeros":  # the others are packed
        pytest.importorskip("compressed_tensors")
    source = save_tiny("qwen3_moe", tmp_path / "source", dtype="bfloat16", shard_size="20KB")
    export, compressed = streamed(source, PACKED[way], tmp_path / "state", layout="auto")
    out = write(export.checkpoint, export.edits(compressed), export.config_edits, tmp_path / "out")
    compare = partial(require_reloads_streamed, dtype=torch.bfloat16, scratch=tmp_path / "scratch")
    found = compare(out, source, compressed)
    model = load_model(ModelOptions(path=str(source), dtype="float32"), device="cpu").model
    compress_model(model, PACKED[way], token_set(), dtype=export.dtype, batch_tokens=64)
    whole = require_reloads(out, model, compressed.report)
    assert (found.weights, found.sparsity) == (whole.weights, whole.sparsity)
    assert found.logits_distance < 1e-2
    assert (found.rounded_distance > found.logits_distance) == ("fp8" in way or "formats" in way)
    file = next(
        path for path in sorted(out.glob("*.safetensors")) if "layers.1.self_attn.o_proj" in str(names_in(path))
    )
    damage(file, "model.layers.1.self_attn.o_proj")
    with pytest.raises(ReloadError, match=r"layers\.1\.self_attn\.o_proj differs after reload"):
        compare(out, source, compressed)


def names_in(path):
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def damage(path, prefix):
    """Change the last byte of the first tensor with this name."""
    entries, _ = read_header(path)
    entry = next(entry for entry in entries if entry.name.startswith(prefix) and not entry.name.endswith("shape"))
    data = bytearray(path.read_bytes())
    data[entry.stop - 1] ^= 1
    path.write_bytes(data)
