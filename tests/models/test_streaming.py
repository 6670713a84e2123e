"""Models whose weights stay on disk give the logits of models in memory, bit for bit, in every family."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from moeprune.artifacts.errors import InputError
from moeprune.models.layers import decoder_layers
from moeprune.models.loading import (
    load_model,
)
from moeprune.models.options import ModelOptions
from moeprune.models.streaming import conversion, waiting
from moeprune.models.streaming.model import affordable_tokens, open_streamed
from moeprune.models.streaming.passes import LayerMajor, StreamingError
from moeprune.models.streaming.waiting import Border
from tests.tiny import TINY, build, inputs, save_tiny

# Encoder-decoders and a token classifier are no causal language models.
FAMILIES = [name for name in TINY if name not in ("switch_transformers", "nllb_moe", "openai_privacy_filter")]
SHAPES = ((2, 24), (1, 16), (3, 40))


@pytest.fixture(autouse=True)
def everything_waits_in_files(monkeypatch):
    """Also the smallest tensors; and experts are converted one or two at a time."""
    monkeypatch.setattr(waiting, "SMALL", 0)
    monkeypatch.setattr(conversion, "BLOCK", 10_000)


def batches(name):
    """Right-padded batches as recording makes them, of different lengths."""
    made = [inputs(name, batch=batch, length=length, seed=length) for batch, length in SHAPES]
    for batch in made:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][0, -4:] = 0
    return made


def passes(streamed, name, folder):
    def forward(batch):
        return streamed.model(**batch, use_cache=False).logits

    return LayerMajor(streamed, [partial(forward, batch) for batch in batches(name)], scratch=folder, memory=0)


def through(running, border=None):
    for _ in running.layers(border):
        for number in range(len(SHAPES)):
            running.advance(number)
    return [running.finish(number) for number in range(len(SHAPES))]


def plain_logits(options, name):
    model = load_model(options, device="cpu").model
    with torch.no_grad():
        return [model(**batch, use_cache=False).logits for batch in batches(name)]


def saved(name, folder, **overrides):
    return ModelOptions(path=str(save_tiny(name, folder / "model", **overrides)))


def assert_equal(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs), float((ours - theirs).abs().max())


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_gives_the_logits_of_a_model_in_memory_and_goes_on_from_a_border(name, tmp_path):
    options = saved(name, tmp_path)
    expected = plain_logits(options, name)
    streamed = open_streamed(options, device="cpu")
    position = len(streamed.layers) - 1
    border = Border(tmp_path / "border", position) if position else None
    with passes(streamed, name, tmp_path) as running:
        for here in running.layers():
            if here == position and border is not None:
                assert running.save(border)
            for number in range(len(SHAPES)):
                running.advance(number)
        assert_equal([running.finish(number) for number in range(len(SHAPES))], expected)
    if border is not None:
        with passes(streamed, name, tmp_path) as running:
            assert_equal(through(running, border), expected)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss", "minimax_m2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes_are_those_of_a_plain_load(name, dtype, tmp_path):
    """float32 from a half-precision checkpoint, and half precision with what a family keeps in float32."""
    path = saved(name, tmp_path, dtype=dtype).path
    for wanted in ("auto", dtype):
        options = ModelOptions(path=path, dtype=wanted)
        with passes(open_streamed(options, device="cpu"), name, tmp_path) as running:
            assert_equal(through(running), plain_logits(options, name))


def test_tied_embeddings_are_read_for_both_ends(tmp_path):
    options = saved("qwen3_moe", tmp_path, tie_word_embeddings=True)
    with passes(open_streamed(options, device="cpu"), "qwen3_moe", tmp_path) as running:
        assert_equal(through(running), plain_logits(options, "qwen3_moe"))


def test_one_layer_is_in_memory_at_a_time_and_nothing_afterwards(tmp_path):
    streamed = open_streamed(saved("deepseek_v3", tmp_path, num_hidden_layers=4, shard_size="40KB"), device="cpu")
    layers = streamed.model.model.layers
    with passes(streamed, "deepseek_v3", tmp_path) as running:
        for position in running.layers():
            filled = [any(not p.is_meta for p in layer.parameters()) for layer in layers]
            assert filled == [number == position for number in range(4)]
            assert all(not p.is_meta for p in layers[position].parameters())
            embedding = streamed.model.model.embed_tokens.weight
            assert embedding.untyped_storage().nbytes() == embedding.element_size(), "the embedding is still held"
            for number in range(len(SHAPES)):
                running.advance(number)
    assert all(parameter.is_meta for parameter in layers.parameters())
    assert not list(tmp_path.glob("waiting-*"))


def test_every_weight_is_read_once(tmp_path, monkeypatch):
    from moeprune.models.disk_tensors import TensorOnDisk

    read = []
    original = TensorOnDisk.read
    monkeypatch.setattr(
        TensorOnDisk, "read", lambda tensor: read.append((tensor.file, tensor.entry.start)) or original(tensor)
    )
    streamed = open_streamed(saved("mixtral", tmp_path, num_hidden_layers=3), device="cpu")
    with passes(streamed, "mixtral", tmp_path) as running:
        through(running)
    assert len(read) == len(set(read)) == len(streamed._weights.tensors)


def test_a_failing_forward_pass_fails_here_and_leaves_the_model_as_it_was(tmp_path):
    streamed = open_streamed(saved("qwen3_moe", tmp_path), device="cpu")

    def broken():
        raise ValueError("no such batch")

    with pytest.raises(ValueError, match="no such batch"), LayerMajor(streamed, [broken], scratch=tmp_path) as running:
        list(running.layers())
    assert not any("forward" in vars(module) for module in streamed.model.modules())


def test_a_model_that_skips_a_layer_is_refused(tmp_path):
    streamed = open_streamed(saved("qwen3_moe", tmp_path, num_hidden_layers=3), device="cpu")
    streamed.model.model.layers[1].forward = lambda hidden, **_: hidden  # nothing is asked for in its place
    with passes(streamed, "qwen3_moe", tmp_path) as running:
        running._streamed.model.model.layers[1].forward = lambda hidden, **_: hidden
        with pytest.raises(StreamingError, match=r"called model\.layers\.2 where model\.layers\.1 was next"):
            through(running)


def test_decoder_layers_are_the_largest_list_of_modules():
    model = build("qwen3_vl_moe")
    assert decoder_layers(model) == [f"model.language_model.layers.{number}" for number in range(2)]
    with pytest.raises(InputError, match="no list of decoder layers"):
        decoder_layers(torch.nn.Linear(2, 2))


def test_a_larger_layer_affords_more_tokens(tmp_path):
    from moeprune.models.layers import find_moe_layers

    streamed = open_streamed(saved("qwen3_moe", tmp_path), device="cpu")
    layers = find_moe_layers(streamed.model)
    few = affordable_tokens(streamed, layers)
    assert few > 1000, "a tiny layer computes whole batches in memory that is always there"
    wide = open_streamed(saved("qwen3_moe", tmp_path / "wide", moe_intermediate_size=64), device="cpu")
    assert affordable_tokens(wide, find_moe_layers(wide.model)) < few


def read_all(options):
    streamed = open_streamed(options, device="cpu")
    streamed.fill(streamed.names)


@pytest.mark.parametrize("damage", ["cut", "renamed", "reshaped"])
def test_a_damaged_checkpoint_is_refused_with_the_place(damage, tmp_path):
    from safetensors.torch import load_file, save_file

    path = Path(saved("qwen3_moe", tmp_path).path) / "model.safetensors"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
        expected = r"model\.safetensors: has \d+ bytes, its header describes \d+"
    else:
        tensors = load_file(path)
        weight = tensors.pop("model.layers.1.self_attn.q_proj.weight")
        name = (
            "model.layers.1.self_attn.other.weight" if damage == "renamed" else "model.layers.1.self_attn.q_proj.weight"
        )
        tensors[name] = weight if damage == "renamed" else weight[:8].contiguous()
        save_file(tensors, path, metadata={"format": "pt"})
        expected = r"model\.layers\.1\.self_attn\.q_proj\.weight"
    with pytest.raises(InputError, match=expected):
        read_all(ModelOptions(path=str(path.parent)))


def test_headers_are_read_once_and_name_every_tensor(tmp_path):
    folder = Path(saved("qwen3_moe", tmp_path, shard_size="40KB").path)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    streamed = open_streamed(ModelOptions(path=str(folder)), device="cpu")
    assert set(streamed._weights.tensors) == set(index["weight_map"])
