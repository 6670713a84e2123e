"""Sizes that must add up, and timed runs that leave the model alone."""

import pytest
import torch

from moeprune.artifacts.errors import InputError
from moeprune.evaluation.speed import peak_beside_weights, speed, weight_bytes
from moeprune.evaluation.students import Student
from moeprune.models.layers import find_moe_layers
from tests.evaluation.material import random_plan, random_tokens
from tests.tiny import build

SHAPE = {"batch": 2, "prompt_tokens": 24, "new_tokens": 4, "repeats": 3}


def test_sizes_are_those_of_the_kept_experts_and_runs_have_a_spread() -> None:
    model = build("qwen3_moe")
    ids = torch.arange(10, 40)[None]
    before = model(input_ids=ids).logits
    metrics = speed(model, {"p": Student(model, random_plan(model, 5))}, random_tokens([30, 40]), **SHAPE)["p"]
    assert torch.equal(model(input_ids=ids).logits, before)
    layers = find_moe_layers(model)
    experts = layers[0].info.num_experts
    an_expert = sum(
        p.numel() // experts * 4 for layer in layers for m in (layer.experts, layer.router) for p in m.parameters()
    )
    assert metrics["speed/weight_bytes/base"] == weight_bytes(model)
    assert metrics["speed/weight_bytes/base"] - metrics["speed/weight_bytes"] == (experts - 5) * an_expert
    for name in ("prefill_tokens_per_second", "decode_tokens_per_second", "time_to_first_token"):
        for suffix in ("", "/base"):
            key = f"speed/{name}{suffix}"
            assert 0 < metrics[f"{key}/low"] <= metrics[key] <= metrics[f"{key}/high"]
    # A prefill of the same shape needs the same room beside the weights, up to the router's few columns.
    beside = [metrics[f"speed/peak_memory{s}"] - metrics[f"speed/weight_bytes{s}"] for s in ("", "/base")]
    assert beside[0] == pytest.approx(beside[1], rel=0.1)


def test_tied_weights_are_counted_once() -> None:
    tied, untied = build("qwen3_moe", tie_word_embeddings=True), build("qwen3_moe", tie_word_embeddings=False)
    head = untied.lm_head.weight
    assert weight_bytes(untied) - weight_bytes(tied) == head.numel() * head.element_size()


def test_peak_memory_grows_with_the_prompt_and_holds_its_cache() -> None:
    model = build("qwen3_moe")
    prompt = torch.arange(10, 90)[None]
    short, long = (peak_beside_weights(model, prompt[:, :length]) for length in (20, 80))
    config = model.config
    cache = 2 * 4 * 80 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert long > short
    assert long > cache
    assert peak_beside_weights(model, prompt) == long


def test_prompts_fit_the_model_or_are_refused() -> None:
    model = build("qwen3_moe", max_position_embeddings=16)
    assert speed(model, {"p": Student(model, random_plan(model, 5))}, random_tokens([3]), **SHAPE)["p"]
    with pytest.raises(InputError, match="16 positions"):
        speed(model, {}, random_tokens([3]), new_tokens=16)
