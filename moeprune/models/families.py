"""The one table of MoE families. Everything that differs between them is a row here.

How a family is handled beyond its row is the same for all: experts are observed through the shared
`experts.forward(hidden, top_k_index, top_k_weights)` contract of transformers 5, and every tensor with an expert axis
on the expert or router path is cut along it. To add a family, add a row and run `pytest tests/models -k NAME`.
"""

from dataclasses import dataclass
from typing import Literal

from moeprune.artifacts.errors import InputError

VERIFIED_WITH = "5.24"  # the transformers release the conformance suite ran on; another one warns

SOFTMAX_RENORM = "softmax over all experts, top-k, renormalised"
SOFTMAX_OPTIONAL = "softmax over all experts, top-k, renormalised if norm_topk_prob"
SIGMOID_GROUPS = (
    "sigmoid, top-k of score + correction bias inside the best groups (top-2 sum), gate = score, "
    "renormalised if norm_topk_prob, times routed_scaling_factor"
)
SOFTMAX_PLAIN = "softmax over all experts, top-k, not renormalised"
SOFTMAX_BIAS = "softmax over all experts, top-k of score + bias, gate = score, renormalised"
SOFTMAX_GROUPS = "softmax, top-k inside the best groups, times routed_scaling_factor"
TOP_K_SOFTMAX = "top-k of the logits, softmax over those"
SPARSEMIXER = "two sequential masked softmaxes (sparsemixer), top-2"
SIGMOID = "sigmoid, top-k, renormalised if norm_topk_prob"
SIGMOID_BIAS = "sigmoid, top-k of score + correction bias, gate = score, renormalised, times a scaling factor"
LOGIT_BIAS = "top-k of logit + correction bias, gate = sigmoid(logit), renormalised if norm_topk_prob"

_SCORING: dict[str, Literal["softmax", "sigmoid"]] = {
    **dict.fromkeys((SOFTMAX_RENORM, SOFTMAX_OPTIONAL, SOFTMAX_PLAIN, SOFTMAX_GROUPS, TOP_K_SOFTMAX), "softmax"),
    **dict.fromkeys((SIGMOID_GROUPS, SIGMOID, SIGMOID_BIAS), "sigmoid"),
}


@dataclass(frozen=True)
class Family:
    """One row. Config keys are those of the text config; a checkpoint may use any of the aliases in `count_keys`."""

    model_type: str
    routing: str  # the rule that makes the gate, in words
    count_keys: tuple[str, ...] = ("num_experts", "num_local_experts")  # hold the number of routed experts
    top_k_key: str = "num_experts_per_tok"
    group_keys: tuple[str, str] | None = None  # (number of groups, groups a token may draw from)
    group_minimum: int = 1  # experts a group must keep: 2 where its score is a top-2 sum
    router: Literal["gate", "router"] = "gate"  # attribute of the block
    mtp_layers_key: str | None = None  # config key that counts multi-token-prediction layers
    verified: bool = False  # the conformance suite covers it
    refused: str = ""  # why the family cannot be pruned; empty when it can

    @property
    def scoring(self) -> Literal["", "softmax", "sigmoid"]:
        """What turns the router's logits into scores, where the whole rule can be replayed (artifacts.routing)."""
        return _SCORING.get(self.routing, "")

    @property
    def renormalises(self) -> bool:
        """Whether gates of the chosen experts sum to a constant, unless the router's norm_topk_prob says otherwise."""
        return self.routing not in (SOFTMAX_PLAIN, SOFTMAX_GROUPS)

    @property
    def how(self) -> str:
        """How the family is served: "generic", or "refused: reason"."""
        return f"refused: {self.refused}" if self.refused else "generic"


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

# Unverified rows write checkpoints that reload exactly (tests/checkpoint) but are not, or not rightly, recorded yet:
# multimodal wrappers, experts in a latent space, block outputs that are scaled, averaged or normalised afterwards.
_ROWS = (
    # softmax over all experts
    Family("mixtral", SOFTMAX_RENORM, verified=True),
    Family("qwen2_moe", SOFTMAX_OPTIONAL, verified=True),
    Family("qwen3_moe", SOFTMAX_OPTIONAL, verified=True),
    Family("qwen3_next", SOFTMAX_OPTIONAL, verified=True),
    Family("qwen3_5_moe_text", SOFTMAX_RENORM, verified=True),
    Family("qwen3_5_moe", SOFTMAX_RENORM, verified=True),
    Family("qwen3_vl_moe", SOFTMAX_RENORM),
    Family("qwen3_omni_moe_thinker", SOFTMAX_OPTIONAL),
    Family("qwen4_exp_text", SOFTMAX_OPTIONAL, verified=True),
    Family("olmoe", SOFTMAX_OPTIONAL, verified=True),
    Family("flex_olmo", SOFTMAX_OPTIONAL, verified=True),
    Family("mellum", SOFTMAX_OPTIONAL, verified=True),
    Family("lara_mini", SOFTMAX_OPTIONAL, verified=True),
    Family("minimax", SOFTMAX_RENORM, verified=True),
    Family("hunyuan_v1_moe", SOFTMAX_RENORM, top_k_key="moe_topk", verified=True),
    Family("jamba", SOFTMAX_PLAIN, router="router", verified=True),
    Family("phimoe", SPARSEMIXER, router="router", verified=True),
    Family("ernie4_5_moe", SOFTMAX_BIAS, count_keys=("moe_num_experts",), top_k_key="moe_k", verified=True),
    Family("gemma4_text", f"{SOFTMAX_RENORM}, times per_expert_scale", top_k_key="top_k_experts", router="router"),
    Family("cohere2_moe", "top-k of the logits, softmax or sigmoid, renormalised if norm_topk_prob"),
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
        verified=True,
    ),
    # softmax inside groups
    Family("deepseek_v2", SOFTMAX_GROUPS, count_keys=_ROUTED, group_keys=_GROUPS, verified=True),
    Family("mistral4", SOFTMAX_GROUPS, count_keys=_ROUTED, group_keys=_GROUPS, group_minimum=2),
    Family("mistral_large4", SOFTMAX_GROUPS, count_keys=_ROUTED, group_keys=_GROUPS, group_minimum=2),
    # sigmoid inside groups
    Family("deepseek_v3", **_DEEPSEEK),  # type: ignore[arg-type]
    Family("deepseek_v32", **_DEEPSEEK),  # type: ignore[arg-type]
    Family("glm4_moe", **_DEEPSEEK),  # type: ignore[arg-type]
    Family("glm4_moe_lite", **_DEEPSEEK),  # type: ignore[arg-type]
    Family("glm4v_moe_text", **{**_DEEPSEEK, "verified": False}),  # type: ignore[arg-type]
    Family("glm_moe_dsa", **_DEEPSEEK),  # type: ignore[arg-type]
    Family("glm5_next", **{**_DEEPSEEK, "verified": False}),  # type: ignore[arg-type]
    Family("dots1", **_DEEPSEEK),  # type: ignore[arg-type]
    Family("sarvam_moe", **_DEEPSEEK),  # type: ignore[arg-type]
    Family("sarvam_mla", **_DEEPSEEK),  # type: ignore[arg-type]
    Family("mimo_v2_flash", **_DEEPSEEK),  # type: ignore[arg-type]
    Family("solar_open", **_DEEPSEEK),  # type: ignore[arg-type]
    Family("axk1", **{**_DEEPSEEK, "verified": False}),  # type: ignore[arg-type]
    Family("axk2", **_DEEPSEEK),  # type: ignore[arg-type]
    Family("hy_v4", **_DEEPSEEK),  # type: ignore[arg-type]
    Family("nemotron_h", **{**_DEEPSEEK, "verified": False}),  # type: ignore[arg-type]
    Family("kimi_k25", **{**_DEEPSEEK, "verified": False}),  # type: ignore[arg-type]
    Family("kimi_linear", top_k_key="num_experts_per_token", **_KIMI),  # type: ignore[arg-type]
    Family("bailing_hybrid", top_k_key="num_experts_per_token", **_KIMI),  # type: ignore[arg-type]
    Family("exaone_moe", **_EXAONE),  # type: ignore[arg-type]
    Family("beam", **{**_EXAONE, "routing": SIGMOID_BIAS, "verified": False}),  # type: ignore[arg-type]
    # sigmoid over all experts
    Family("afmoe", SIGMOID_BIAS, router="router", verified=True),
    Family("flint", SIGMOID, verified=True),
    Family("hy_v3", SIGMOID_BIAS, verified=True),
    Family("minimax_m2", SIGMOID_BIAS, verified=True),
    Family("minimax_m3_vl_text", SIGMOID_BIAS),
    Family("laguna", SIGMOID_BIAS),
    Family("lfm2_moe", SIGMOID_BIAS, verified=True),
    Family("kolibri1", LOGIT_BIAS, verified=True),
    Family("inkling2_text", SIGMOID_BIAS, count_keys=_ROUTED, verified=True),
    Family("step3p7", SIGMOID_BIAS, count_keys=_ROUTED),
    # never
    Family("jetmoe", "", refused="its attention has experts too, under the same count; they cannot be pruned alone"),
    Family("doge", "", refused="its experts are rows of product-key embeddings, whose number is a square"),
    Family("switch_transformers", "", refused="an encoder-decoder with expert capacity, which is not observed"),
    Family("nllb-moe", "", refused="an encoder-decoder with expert capacity, which is not observed"),
    Family("ernie4_5_vl_moe", "", refused="text and vision experts share one count"),
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
