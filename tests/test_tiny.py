"""The tiny models are what the other tests take them for."""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny import NO_TEXT_ALONE, TINY, build, inputs, save_tiny, tiny_tokenizer

CORE = ("qwen3_moe", "qwen3_next", "mixtral", "olmoe", "deepseek_v3", "glm4_moe")


@pytest.mark.parametrize("name", [name for name in TINY if name not in NO_TEXT_ALONE])
def test_logits_are_finite_and_spread(name):
    with torch.no_grad():
        logits = build(name)(**inputs(name)).logits
    assert logits.isfinite().all()
    assert logits.std() > 0.1


@pytest.mark.parametrize("name", CORE)
def test_experts_matter_and_routing_is_uneven(name):
    model = build(name)
    experts = next(module for path, module in model.named_modules() if path.endswith("mlp.experts"))
    selected = []
    handle = experts.register_forward_pre_hook(lambda module, args: selected.append(args[1]))
    with torch.no_grad():
        before = model(**inputs(name, batch=8)).logits.log_softmax(-1)
        handle.remove()
        experts.down_proj[:4] = 0
        after = model(**inputs(name, batch=8)).logits.log_softmax(-1)
    counts = torch.bincount(selected[0].flatten(), minlength=8)
    assert counts.min() > 0
    assert counts.max() > 1.5 * counts.min()
    assert (before.exp() * (before - after)).sum(-1).mean() > 0.02


def test_the_seed_decides_the_weights_and_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, same, other = (build("deepseek_v3", seed=seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(first[key], same[key]) for key in first)
    assert not torch.equal(first["model.layers.1.mlp.gate.weight"], other["model.layers.1.mlp.gate.weight"])


def test_overrides_reach_a_nested_text_config():
    assert build("qwen3_moe", num_experts=16).config.num_experts == 16
    config = build("qwen3_vl_moe", num_experts=16, image_token_id=119).config
    assert (config.text_config.num_experts, config.image_token_id) == (16, 119)


@pytest.mark.parametrize("name", CORE)
def test_a_saved_checkpoint_reloads_to_the_same_logits(name, tmp_path):
    directory = save_tiny(name, tmp_path / name, shard_size="30KB")
    assert (directory / "model.safetensors.index.json").is_file()
    loaded, info = AutoModelForCausalLM.from_pretrained(directory, dtype="float32", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**inputs(name)).logits, build(name)(**inputs(name)).logits)


def test_a_saved_checkpoint_looks_like_a_hub_checkpoint(tmp_path):
    config = json.loads((save_tiny("qwen3_moe", tmp_path / "qwen", dtype="bfloat16") / "config.json").read_text())
    assert config["num_experts"] == 8
    assert "num_local_experts" not in config
    assert config["torch_dtype"] == "bfloat16"
    assert config["rope_theta"] == 10000.0
    with safe_open(
        save_tiny("deepseek_v3", tmp_path / "deepseek", dtype="bfloat16") / "model.safetensors", "pt"
    ) as file:
        assert file.get_tensor("model.layers.1.mlp.gate.e_score_correction_bias").dtype == torch.float32
        assert file.get_tensor("model.layers.1.mlp.experts.7.down_proj.weight").dtype == torch.bfloat16


def test_the_tokenizer_fits_the_models_and_marks_what_the_assistant_said(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) <= 120  # the multimodal configs use the ids from 120 on
    text = 'def f(x):\n    return {"x": [x]}  # ~'
    assert tokenizer.decode(tokenizer.encode(text)) == text
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "2"},
        {"role": "assistant", "content": "it is 2"},
    ]
    encoded = tokenizer.apply_chat_template(
        messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
    )
    spoken = encoded["input_ids"][0][encoded["assistant_masks"].flatten().bool()]
    assert tokenizer.decode(spoken) == '<call>{"name": "add", "arguments": {"a": 1}}</call></turn>\nit is 2</turn>\n'
