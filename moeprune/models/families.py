"""The one table of MoE families. Everything that differs between them is a row here.

How a family is handled beyond its row is the same for all: experts are observed through the shared
`experts.forward(hidden, top_k_index, top_k_weights)` contract of transformers 5, and every tensor with an expert axis
on the expert or router path is cut along it. What a row can say otherwise is in models/family.py. To add a family, add
a row and run `pytest tests/models tests/checkpoint/test_families.py -k NAME`.
"""

from moeprune.artifacts.errors import InputError
from moeprune.models.family import (
    LOGIT_BIAS,
    SIGMOID,
    SIGMOID_BIAS,
    SIGMOID_BIAS_OUTSIDE,
    SIGMOID_GROUPS,
    SIGMOID_GROUPS_OUTSIDE,
    SOFTMAX_BIAS,
    SOFTMAX_GROUPS,
    SOFTMAX_GROUPS_RENORM,
    SOFTMAX_OPTIONAL,
    SOFTMAX_PLAIN,
    SOFTMAX_RENORM,
    SPARSEMIXER,
    TOP_K_SOFTMAX,
    Family,
)

VERIFIED_WITH = "5.24"  # the transformers release the conformance suite ran on; another one warns

_DEEPSEEK = {
    "routing": SIGMOID_GROUPS,
    "count_keys": ("n_routed_experts", "num_local_experts"),
    "group_keys": ("n_group", "topk_group"),
    "group_minimum": 2,
    "mtp_layers_key": "num_nextn_predict_layers",
    "verified": True,
}

_KIMI = {**_DEEPSEEK, "count_keys": ("num_experts",), "group_keys": ("num_expert_group", "topk_group")}
_EXAONE = {**_DEEPSEEK, "count_keys": ("num_experts",)}
_ROUTED = ("n_routed_experts", "num_local_experts")
_GROUPS = ("n_group", "topk_group")

# A row of a multimodal family has the model type of the whole config or of its text config, whichever is known here.
_ROWS = (
    # softmax over all experts
    Family("mixtral", SOFTMAX_RENORM, verified=True),
    Family("qwen2_moe", SOFTMAX_OPTIONAL, verified=True),
    Family("qwen3_moe", SOFTMAX_OPTIONAL, verified=True),
    Family("qwen3_next", SOFTMAX_OPTIONAL, verified=True),
    Family("qwen3_5_moe_text", SOFTMAX_RENORM, verified=True),
    Family("qwen3_5_moe", SOFTMAX_RENORM, verified=True),
    Family("qwen3_vl_moe", SOFTMAX_RENORM, verified=True),
    Family("qwen3_omni_moe_thinker", SOFTMAX_OPTIONAL, verified=True),
    Family("qwen4_exp_text", SOFTMAX_OPTIONAL, inside=("qwen4_exp",), verified=True),
    Family("olmoe", SOFTMAX_OPTIONAL, verified=True),
    Family("flex_olmo", SOFTMAX_OPTIONAL, verified=True),
    Family("mellum", SOFTMAX_OPTIONAL, verified=True),
    Family("lara_mini", SOFTMAX_OPTIONAL, verified=True),
    Family("minimax", SOFTMAX_RENORM, verified=True),
    Family("hunyuan_v1_moe", SOFTMAX_RENORM, top_k_key="moe_topk", verified=True),
    Family("jamba", SOFTMAX_PLAIN, router="router", verified=True),
    Family("phimoe", SPARSEMIXER, router="router", verified=True),
    Family("ernie4_5_moe", SOFTMAX_BIAS, count_keys=("moe_num_experts",), top_k_key="moe_k", verified=True),
    Family(
        "gemma4_text",
        f"{SOFTMAX_RENORM}, times per_expert_scale",
        top_k_key="top_k_experts",
        router="router",
        bare=True,
        inside=("gemma4",),
        verified=True,
    ),
    Family(
        "dbrx",
        "softmax over all experts, top-k, normalised by moe_normalize_expert_weights",
        count_keys=("moe_num_experts",),
        top_k_key="moe_top_k",
        router="router",
        config_section="ffn_config",
        flat_rows=True,
        verified=True,
    ),
    Family(
        "longcat_flash",
        "softmax over experts and identity classes, top-k of score + bias, gate = score, times a scaling factor",
        count_keys=("n_routed_experts",),
        top_k_key="moe_topk",
        router="router",
        extra_classes="zero_expert_num",
        null_slots="classes",
        single_slots=False,
        verified=True,
    ),
    Family(
        "zaya",
        "softmax over experts and a class that skips them, top-k of score + bias, gate = score",
        extra_classes=1,
        null_slots="zero_gates",
        reads_config=True,
        verified=True,
    ),
    # softmax over the chosen ones
    Family("gpt_oss", TOP_K_SOFTMAX, router="router", verified=True),
    Family("granitemoe", TOP_K_SOFTMAX, router="router", verified=True),
    Family("granitemoeshared", TOP_K_SOFTMAX, router="router", verified=True),
    Family("granitemoehybrid", TOP_K_SOFTMAX, router="router", verified=True),
    Family("granitemoe_swa", TOP_K_SOFTMAX, router="router", verified=True),
    Family(
        "aria_text",
        TOP_K_SOFTMAX,
        count_keys=("moe_num_experts",),
        top_k_key="moe_topk",
        router="router",
        inside=("aria",),
        verified=True,
    ),
    Family(
        "cohere2_moe",
        "top-k of the logits, softmax or sigmoid over those, renormalised if norm_topk_prob",
        post_scale="shared_expert_combination_strategy",
        verified=True,
    ),
    # softmax inside groups
    Family("deepseek_v2", SOFTMAX_GROUPS, count_keys=_ROUTED, group_keys=_GROUPS, verified=True),
    Family("mistral4", SOFTMAX_GROUPS, count_keys=_ROUTED, group_keys=_GROUPS, group_minimum=2, verified=True),
    Family(
        "mistral_large4",
        SOFTMAX_GROUPS_RENORM,
        count_keys=_ROUTED,
        group_keys=_GROUPS,
        group_minimum=2,
        verified=True,
    ),
    # sigmoid inside groups
    Family("deepseek_v3", **_DEEPSEEK),  # type: ignore[arg-type]
    Family("deepseek_v32", **_DEEPSEEK),  # type: ignore[arg-type]
    Family("glm4_moe", **_DEEPSEEK),  # type: ignore[arg-type]
    Family("glm4_moe_lite", **_DEEPSEEK),  # type: ignore[arg-type]
    Family("glm4v_moe_text", **_DEEPSEEK),  # type: ignore[arg-type]
    Family("glm_moe_dsa", **_DEEPSEEK),  # type: ignore[arg-type]
    Family("glm5_next", **_DEEPSEEK),  # type: ignore[arg-type]
    Family("dots1", **_DEEPSEEK),  # type: ignore[arg-type]
    Family("sarvam_moe", **_DEEPSEEK),  # type: ignore[arg-type]
    Family("sarvam_mla", **_DEEPSEEK),  # type: ignore[arg-type]
    Family("mimo_v2_flash", **_DEEPSEEK),  # type: ignore[arg-type]
    Family("solar_open", **_DEEPSEEK),  # type: ignore[arg-type]
    Family("axk1", normalised_by="post_mlp_layernorm", **_DEEPSEEK),  # type: ignore[arg-type]
    Family("axk2", **_DEEPSEEK),  # type: ignore[arg-type]
    Family("hy_v4", **_DEEPSEEK),  # type: ignore[arg-type]
    Family("hy_v4_vl", **_DEEPSEEK),  # type: ignore[arg-type]
    Family("nemotron_h", projection="fc2_latent_proj", **_DEEPSEEK),  # type: ignore[arg-type]
    Family("kimi_k25", **_DEEPSEEK),  # type: ignore[arg-type]
    Family("kimi_linear", top_k_key="num_experts_per_token", **_KIMI),  # type: ignore[arg-type]
    Family("bailing_hybrid", top_k_key="num_experts_per_token", **_KIMI),  # type: ignore[arg-type]
    Family("exaone_moe", **_EXAONE),  # type: ignore[arg-type]
    Family("beam", **{**_EXAONE, "routing": SIGMOID_GROUPS_OUTSIDE}, post_scale="routed_scaling_factor"),  # type: ignore[arg-type]
    # sigmoid over all experts
    Family("afmoe", SIGMOID_BIAS, router="router", verified=True),
    Family("flint", SIGMOID, verified=True),
    Family("hy_v3", SIGMOID_BIAS, verified=True),
    Family("minimax_m2", SIGMOID_BIAS, verified=True),
    Family(
        "minimax_m3_vl_text",
        SIGMOID_BIAS_OUTSIDE,
        post_scale="routed_scaling_factor",
        inside=("minimax_m3_vl",),
        verified=True,
    ),
    Family("laguna", SIGMOID_BIAS_OUTSIDE, post_scale="routed_scaling_factor", verified=True),
    Family("muse_spark", SIGMOID_BIAS, projection="post_expert_proj", verified=True),
    Family("lfm2_moe", SIGMOID_BIAS, verified=True),
    Family("kolibri1", LOGIT_BIAS, verified=True),
    Family("inkling2_text", SIGMOID_BIAS, count_keys=_ROUTED, inside=("inkling2",), verified=True),
    Family("step3p7", SIGMOID_BIAS_OUTSIDE, count_keys=_ROUTED, post_scale="routed_scaling_factor", verified=True),
    Family(
        "inkling_text",
        "sigmoid, top-k of score + bias; gates: softmax of the log scores of chosen and shared experts, times scales",
        count_keys=_ROUTED,
        extra_classes="n_shared_experts",
        inside=("inkling_mm_model",),
        verified=True,
    ),
    Family(
        "llama4_text",
        "top-k of the logits, sigmoid; the gate multiplies the input",
        router="router",
        gates_input=True,
        inside=("llama4",),
        verified=True,
    ),
    # experts by token in the first layers
    Family(
        "deepseek_v4",
        "sqrt(softplus), top-k of score + bias or a table by token (a removed expert's place goes to kept ones in "
        "turn), gate = score, renormalised, times a scaling factor",
        count_keys=_ROUTED,
        expert_table="tid2eid",
        verified=True,
    ),
    # never
    Family("jetmoe", "", refused="its attention has experts too, under the same count; they cannot be pruned alone"),
    Family("doge", "", refused="its experts are rows of product-key embeddings, whose number is a square"),
    Family("switch_transformers", "", refused="an encoder-decoder with expert capacity, which is not observed"),
    Family("nllb-moe", "", refused="an encoder-decoder with expert capacity, which is not observed"),
    Family("ernie4_5_vl_moe", "", refused="text and vision experts share one count"),
    Family(
        "qwen3_omni_moe",
        "",
        refused="its talker has experts too, which text does not reach; save its thinker alone "
        "(Qwen3OmniMoeThinkerForConditionalGeneration) and prune that",
    ),
    Family("dots3_note", "", refused="its vision layers have experts too, in numbers of their own for every layer"),
    Family("diffusion_gemma", "", refused="it denoises blocks of tokens; what is recorded is for causal models"),
    Family("inkling2_loop", "", refused="its layers run several times a token, and statistics are for one pass"),
    Family("openai_privacy_filter", "", refused="a token classifier, not a language model"),
)

FAMILIES: dict[str, Family] = {row.model_type: row for row in _ROWS}


def family_of(model_type: str) -> Family:
    """The family's row. Raises InputError for an unknown or refused one, naming what is supported."""
    family = FAMILIES.get(model_type)
    if family is None:
        supported = ", ".join(sorted(name for name, row in FAMILIES.items() if not row.refused))
        raise InputError(
            f"model_type {model_type!r} is not a supported MoE family; supported: {supported}. For a dense model use "
            "`moeprune compress`; to add a family see CONTRIBUTING.md"
        )
    if family.refused:
        raise InputError(f"model_type {model_type!r} cannot be pruned: {family.refused}")
    return family
