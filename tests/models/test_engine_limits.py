"""What engines ask of the number of experts: each note where it is due, with its engine and the way out."""

import json

import pytest

from moeprune.models.engine_limits import notes, parallel_sizes, router_groups, serve_flags
from moeprune.reference import MODEL_DIR

QWEN = {"model_type": "qwen3_moe", "num_attention_heads": 32, "num_key_value_heads": 4, "moe_intermediate_size": 768}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
}


def said(config, count, top_k=8):
    return [f"{note.effect} {note}" for note in notes(config, [count], top_k=top_k)]


def test_counts_with_tuned_kernels_that_split_need_no_note():
    for count in (64, 128, 256):
        assert said(QWEN, count) == []


@pytest.mark.parametrize(
    ("config", "count", "words"),
    [
        (QWEN, 96, ("slower", "vLLM", "96 experts", "benchmark_moe.py --tune", "72, 128")),
        (QWEN, 62, ("advice", "4 or 8 devices", "62 experts", "multiple_of: 8")),
        (QWEN, 77, ("advice", "2 or 4 or 8 devices", "multiple_of: 8")),
        (QWEN, 8, ("advice", "all 8 experts", "lower selection.budget.prune")),
        (QWEN, 2000, ("refuses", "llama.cpp", "1024")),
        (QWEN, 7, ("refuses", "7 experts", "picks 8", "lower selection.budget.prune")),
        (DEEPSEEK, 100, ("refuses", "8 groups", "multiple_of: 8")),
        (DEEPSEEK, 8, ("refuses", "4 groups of 1", "lower selection.budget.prune")),
        ({**QWEN, "num_nextn_predict_layers": 1}, 64, ("advice", "num_nextn_predict_layers: 1", "speculative")),
        ({"model_type": "deepseek_v4", "num_attention_heads": 8}, 160, ("refuses", "CUDA", "vllm#50982", "keep 128")),
        ({"text_config": {**DEEPSEEK}}, 100, ("refuses", "8 groups")),
    ],
)
def test_each_trap_is_named_with_its_engine_and_a_way_out(config, count, words):
    lines = said(config, count)
    assert any(all(word in line for word in words) for line in lines), lines


def test_layers_that_differ_are_refused_before_everything_else():
    first, *_ = notes(QWEN, [64, 32, 64], top_k=8)
    assert first.effect == "refuses"
    assert "32 to 64" in first.text
    assert "scope: layer" in first.text


def test_the_gravest_comes_first():
    effects = [note.effect for note in notes(DEEPSEEK, [77], top_k=8)]
    assert effects == sorted(effects, key=("refuses", "slower", "advice").index)
    assert len(set(effects)) == 3


def test_sizes_divide_heads_widths_and_experts():
    sizes = parallel_sizes(QWEN, 96)
    assert sizes.tensor == (2, 4, 8, 16, 32)
    assert sizes.expert == (2, 4, 8, 16, 32)
    assert parallel_sizes({**QWEN, "num_key_value_heads": 3}, 96).tensor == ()
    assert parallel_sizes({**QWEN, "moe_intermediate_size": 770}, 7) == parallel_sizes(
        {**QWEN, "moe_intermediate_size": 770}, 9
    )
    assert parallel_sizes({**QWEN, "moe_intermediate_size": 770}, 7).tensor == (2,)
    assert parallel_sizes(DEEPSEEK, 128).tensor == (2, 4, 8, 16, 32, 64)  # latent attention: one key for all heads


def test_groups_are_found_in_nested_configs():
    assert router_groups({"text_config": DEEPSEEK}) == (8, 4)
    assert router_groups(QWEN) == (1, 1)


@pytest.mark.parametrize(
    ("model_type", "template", "flags"),
    [
        ("qwen3_moe", "{{ tools }}<tool_call>{...}<think>", ["hermes", "qwen3"]),
        ("qwen3_moe", "{{ tools }}<tool_call><function=x>", ["qwen3_coder"]),
        ("glm4_moe", "{{ tools }}<tool_call><arg_key>enable_thinking", ["glm45", "glm45"]),
        ("gpt_oss", "{{ tools }}<|channel|>", ["openai", "openai_gptoss"]),
        ("mixtral", "{{ tools }}[TOOL_CALLS]", ["mistral"]),
        ("mixtral", "{{ messages }}", []),
        ("mixtral", None, []),
    ],
)
def test_parsers_follow_from_the_template(model_type, template, flags):
    found = serve_flags({"model_type": model_type}, template)
    assert [word for word in found if not word.startswith("--")] == flags
    assert ("--enable-auto-tool-choice" in found) == ("--tool-call-parser" in found)


def test_the_reference_model_gets_the_parser_of_its_template():
    config = json.loads((MODEL_DIR / "config.json").read_text())
    template = (MODEL_DIR / "chat_template.jinja").read_text()
    assert serve_flags(config, template) == ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
