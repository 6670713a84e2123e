"""Tiny checkpoints of the families that servers know, with random weights, and each with half of its experts.

    python experiments/serving/models.py DIRECTORY [FAMILY ...]

Writes DIRECTORY/<family>/base and DIRECTORY/<family>/pruned in bfloat16: 8 experts, 4 of which stay, chosen by HOPE
from a recording like any other. All have the reference model's tokenizer, so that chat and tool calls can be compared.
"""

import json
import shutil
import sys
from pathlib import Path

import moeprune as mp
from moeprune.reference import MODEL_DIR
from tests.tiny import save_tiny

FAMILIES = (
    "qwen3_moe",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "glm4_moe",
    "deepseek_v2",
    "deepseek_v2_groups",
    "deepseek_v3",
    "gpt_oss",
)
# Widths that servers' kernels have; hidden 32 and heads of 8, as in the tests, are too small for some.
SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.08,
    "bos_token_id": None,
    "eos_token_id": 3,
    "pad_token_id": 1,
    "max_position_embeddings": 1024,
}
HEADS = {"head_dim": 32}
NARROW = {"moe_intermediate_size": 64}
SHARED = {"shared_expert_intermediate_size": 64}
# Latent attention is compiled for the widths of DeepSeek's own models.
LATENT = {
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_key_value_heads": 4,
}
PLAIN = {"norm_topk_prob": False, "routed_scaling_factor": 1.0}  # DeepSeek-V2 never renormalises
EXTRA = {
    "qwen3_moe": {**HEADS, **NARROW},
    "mixtral": {**HEADS},
    "olmoe": {"num_key_value_heads": 4},  # as in the released models; llama.cpp expects it
    "qwen2_moe": {**NARROW, **SHARED, "mlp_only_layers": []},
    "glm4_moe": {**HEADS, **NARROW, "vocab_size": 4112},
    "deepseek_v2": {**LATENT, **NARROW, **PLAIN, "n_group": 1, "topk_group": 1},
    "deepseek_v2_groups": {**LATENT, **NARROW, **PLAIN},
    "deepseek_v3": {**LATENT, **NARROW},
    "gpt_oss": {**HEADS, "intermediate_size": 128},
}
# What config.json of the hub's checkpoints says and transformers does not write: servers read the routing rule there.
HUB_KEYS = {
    "deepseek_v2": {"scoring_func": "softmax", "topk_method": "greedy"},
    "deepseek_v2_groups": {"scoring_func": "softmax", "topk_method": "group_limited_greedy"},
    "deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 0},
}
GLM_TOKENS = ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>")  # its converter asks for them
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def make(family: str, folder: Path, *, prune: float = 0.5) -> Path:
    """The pruned checkpoint's directory."""
    base, pruned = folder / family / "base", folder / family / "pruned"
    save_tiny(family.removesuffix("_groups"), base, dtype="bfloat16", **{**SHAPE, **EXTRA[family]})
    for name in ("special_tokens_map.json", "added_tokens.json"):
        (base / name).unlink(missing_ok=True)
    for name in TOKENIZER:
        shutil.copyfile(MODEL_DIR / name, base / name)
    config = json.loads((base / "config.json").read_text()) | HUB_KEYS.get(family, {})
    (base / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if family == "glm4_moe":
        add_tokens(base / "tokenizer.json", GLM_TOKENS)
    return prune_half(base, pruned, prune=prune)


def add_tokens(path: Path, tokens: tuple[str, ...]) -> None:
    tokenizer = json.loads(path.read_text())
    first = 1 + max(tokenizer["model"]["vocab"].values())
    same = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [{"id": first + i, "content": token, **same} for i, token in enumerate(tokens)]
    path.write_text(json.dumps(tokenizer, ensure_ascii=False))


def prune_half(base: Path, pruned: Path, *, prune: float = 0.5) -> Path:
    loaded = mp.load_model(mp.ModelOptions(path=str(base)))
    agent = mp.Domain(name="agent", path="reference:agent", tokens=4096)
    statistics = mp.record(loaded.model, mp.load_tokens([agent], loaded.tokenizer, mp.Intake(), part="calibration"))
    plan = mp.select(statistics, mp.SelectionOptions.parse({"budget": {"prune": prune}}))
    mp.prune(base, plan, pruned, overwrite=True)
    return pruned


if __name__ == "__main__":
    for name in sys.argv[2:] or FAMILIES:
        print(make(name, Path(sys.argv[1])))
    if not sys.argv[2:]:
        print(prune_half(MODEL_DIR, Path(sys.argv[1]) / "reference" / "pruned"))
