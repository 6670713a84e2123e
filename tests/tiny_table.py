"""The configs of the tiny models: every MoE family of transformers 5, with 8 routed experts and top-2 unless stated.

Vocabulary 128, hidden size 32, two or three layers. A row is (model class, config class, config options); classes are
named, not imported, so that reading the table costs nothing. Options are the family's own config keys.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TinyModel:
    """One row: names of classes in `transformers` and the options of the config."""

    model_class: str
    config_class: str
    options: dict[str, Any] = field(default_factory=dict)


# 0.2 is about 1 / sqrt(32): router logits get a spread of one and an expert's output is as large as the residual.
# With transformers' usual 0.02 all experts are equally likely and none matters.
BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
HEADS: dict[str, Any] = {"head_dim": 8}
LATENT_ATTENTION: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
INDEXER: dict[str, Any] = {"index_topk": 16, "index_head_dim": 16, "index_n_heads": 2}
LINEAR_ATTENTION: dict[str, Any] = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_d_head": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
LINEAR_THEN_FULL: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
DENSE_THEN_SPARSE: dict[str, Any] = {"mlp_layer_types": ["dense", "sparse"]}
FIRST_DENSE: dict[str, Any] = {"first_k_dense_replace": 1}

# The three spellings of "8 experts, 2 a token".
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2}
ROUTED_EXPERTS: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED: dict[str, Any] = {"shared_expert_intermediate_size": 16}
DEEPSEEK: dict[str, Any] = {
    **ROUTED_EXPERTS,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
EXPERT_GROUPS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 16,
    "num_expert_group": 2,
    "topk_group": 1,
}

MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
QWEN_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
QWEN_MEDIA: dict[str, Any] = {"image_token_id": 120, "video_token_id": 121, "vision_start_token_id": 122}
SMALL_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 32,
}


def _without(options: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key not in keys}


# One paragraph a family: the formatter would make a page of each.
# fmt: off
SOFTMAX: dict[str, TinyModel] = {
    "mixtral": TinyModel("MixtralForCausalLM", "MixtralConfig", {**BASE, **HEADS, **LOCAL_EXPERTS}),
    "qwen2_moe": TinyModel(
        "Qwen2MoeForCausalLM", "Qwen2MoeConfig",
        {**BASE, **EXPERTS, **SHARED, "mlp_only_layers": [0], "num_hidden_layers": 3}
    ),
    "qwen3_moe": TinyModel(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig",
        {**BASE, **HEADS, **EXPERTS, "norm_topk_prob": True}
    ),
    "qwen3_next": TinyModel(
        "Qwen3NextForCausalLM", "Qwen3NextConfig",
        {**BASE, **HEADS, **EXPERTS, **SHARED, **LINEAR_ATTENTION, **LINEAR_THEN_FULL}
    ),
    "qwen3_5_moe_text": TinyModel(
        "Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig",
        {**BASE, **HEADS, **EXPERTS, **SHARED, **LINEAR_ATTENTION, **LINEAR_THEN_FULL}
    ),
    "qwen3_vl_moe": TinyModel(
        "Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoeConfig",
        {"text_config": {**BASE, **HEADS, **EXPERTS, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
         "vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0]}, **QWEN_MEDIA, "vision_end_token_id": 123}
    ),
    "qwen3_5_moe": TinyModel(
        "Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeConfig",
        {"text_config": {**BASE, **HEADS, **EXPERTS, **SHARED, **LINEAR_ATTENTION, **LINEAR_THEN_FULL},
         "vision_config": QWEN_VISION, **QWEN_MEDIA, "vision_end_token_id": 123}
    ),
    "qwen3_omni_moe_thinker": TinyModel(
        "Qwen3OmniMoeThinkerForConditionalGeneration", "Qwen3OmniMoeThinkerConfig",
        {"text_config": {**BASE, **HEADS, **EXPERTS, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
         "vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0]}, "audio_config": {"encoder_layers": 1,
         "encoder_attention_heads": 2, "d_model": 32, "encoder_ffn_dim": 32, "num_mel_bins": 16, "output_dim": 32,
         "n_window": 4, "downsample_hidden_size": 8}, "initializer_range": 0.2, "image_token_id": 120,
         "video_token_id": 121, "audio_token_id": 122, "audio_start_token_id": 123, "vision_start_token_id": 124}
    ),
    "qwen4_exp_text": TinyModel(
        "Qwen4ExpForCausalLM", "Qwen4ExpTextConfig",
        {**BASE, **HEADS, **EXPERTS, **SHARED, **LINEAR_ATTENTION,
         "layer_types": ["linear_attention", "indexed_attention"], "hc_count": 2, "hc_lowrank": 8,
         "ngram_vocab_size_base": 64, "heads_per_ngram": 2, "split_ngram_parts": 2, "ple_embed_dim": 8,
         "make_ngram_vocab_size_divisible_by": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8,
         "indexer_budget": 8, "indexer_compress_ratio": 4}
    ),
    "olmoe": TinyModel("OlmoeForCausalLM", "OlmoeConfig", {**BASE, "num_experts": 8, "num_experts_per_tok": 2}),
    "flex_olmo": TinyModel(
        "FlexOlmoForCausalLM", "FlexOlmoConfig",
        {**BASE, "num_experts": 8, "num_experts_per_tok": 2}
    ),
    "mellum": TinyModel("MellumForCausalLM", "MellumConfig", {**BASE, **HEADS, **EXPERTS}),
    "lara_mini": TinyModel(
        "LaraMiniForCausalLM", "LaraMiniConfig",
        {**BASE, **HEADS, **EXPERTS, **SHARED, **LINEAR_ATTENTION, **LINEAR_THEN_FULL}
    ),
    "minimax": TinyModel(
        "MiniMaxForCausalLM", "MiniMaxConfig",
        {**BASE, **HEADS, **LOCAL_EXPERTS, **LINEAR_THEN_FULL, "block_size": 16}
    ),
    "phimoe": TinyModel("PhimoeForCausalLM", "PhimoeConfig", {**BASE, **LOCAL_EXPERTS}),
    "jamba": TinyModel(
        "JambaForCausalLM", "JambaConfig",
        {**BASE, "num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 4, "attn_layer_period": 2,
         "attn_layer_offset": 1, "use_mamba_kernels": False, "mamba_d_state": 4, "mamba_dt_rank": 4}
    ),
    "gpt_oss": TinyModel("GptOssForCausalLM", "GptOssConfig", {**BASE, **HEADS, **LOCAL_EXPERTS}),
    "openai_privacy_filter": TinyModel(
        "OpenAIPrivacyFilterForTokenClassification", "OpenAIPrivacyFilterConfig",
        {**BASE, **HEADS, **LOCAL_EXPERTS}
    ),
    "granitemoe": TinyModel("GraniteMoeForCausalLM", "GraniteMoeConfig", {**BASE, **LOCAL_EXPERTS}),
    "granitemoeshared": TinyModel(
        "GraniteMoeSharedForCausalLM", "GraniteMoeSharedConfig",
        {**BASE, **LOCAL_EXPERTS, "shared_intermediate_size": 16}
    ),
    "granitemoehybrid": TinyModel(
        "GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig",
        {**BASE, **MAMBA, **LOCAL_EXPERTS, "shared_intermediate_size": 16, "layer_types": ["mamba", "attention"]}
    ),
    "granitemoe_swa": TinyModel(
        "GraniteMoeSWAForCausalLM", "GraniteMoeSWAConfig",
        {**BASE, **HEADS, **LOCAL_EXPERTS, "shared_intermediate_size": 16}
    ),
    "hunyuan_v1_moe": TinyModel(
        "HunYuanMoEV1ForCausalLM", "HunYuanMoEV1Config",
        {**BASE, **HEADS, "num_experts": 8, "moe_topk": 2}
    ),
    "aria_text": TinyModel(
        "AriaTextForCausalLM", "AriaTextConfig",
        {**BASE, "moe_num_experts": 8, "moe_topk": 2, "moe_num_shared_experts": 1}
    ),
    "cohere2_moe": TinyModel(
        "Cohere2MoeForCausalLM", "Cohere2MoeConfig",
        {**BASE, **HEADS, "num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 1, "logit_scale": 1.0}
    ),
    "ernie4_5_moe": TinyModel(
        "Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeConfig",
        {**BASE, "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1,
         "moe_layer_start_index": 1}
    ),
    "gemma4_text": TinyModel(
        "Gemma4ForCausalLM", "Gemma4TextConfig",
        {**BASE, **HEADS, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 16,
         "global_head_dim": 8, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 128,
         "layer_types": ["sliding_attention", "full_attention"]}
    ),
}

SIGMOID_GROUPS: dict[str, TinyModel] = {
    "deepseek_v2": TinyModel(
        "DeepseekV2ForCausalLM", "DeepseekV2Config",
        {**BASE, **LATENT_ATTENTION, **DEEPSEEK, **FIRST_DENSE, "topk_method": "group_limited_greedy"}
    ),
    "deepseek_v3": TinyModel(
        "DeepseekV3ForCausalLM", "DeepseekV3Config",
        {**BASE, **LATENT_ATTENTION, **DEEPSEEK, **FIRST_DENSE}
    ),
    "deepseek_v32": TinyModel(
        "DeepseekV32ForCausalLM", "DeepseekV32Config",
        {**BASE, **LATENT_ATTENTION, **DEEPSEEK, **INDEXER, **FIRST_DENSE}
    ),
    "deepseek_v4": TinyModel(
        "DeepseekV4ForCausalLM", "DeepseekV4Config",
        {**_without(BASE, "intermediate_size"), **ROUTED_EXPERTS, "num_hidden_layers": 3, "head_dim": 16,
         "q_lora_rank": 16, "num_key_value_heads": 1, "n_shared_experts": 1, "o_groups": 2, "o_lora_rank": 8,
         "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4, "sliding_window": 8, "hc_mult": 2,
         "hc_sinkhorn_iters": 2, "mlp_layer_types": ["hash_moe", "moe", "moe"],
         "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
         "partial_rotary_factor": 0.5}
    ),
    "glm4_moe": TinyModel("Glm4MoeForCausalLM", "Glm4MoeConfig", {**BASE, **HEADS, **DEEPSEEK, **FIRST_DENSE}),
    "glm4_moe_lite": TinyModel("Glm4MoeLiteForCausalLM", "Glm4MoeLiteConfig", {**BASE, **LATENT_ATTENTION, **DEEPSEEK}),
    "glm4v_moe_text": TinyModel(
        "Glm4vMoeForConditionalGeneration", "Glm4vMoeConfig",
        {"text_config": {**BASE, **HEADS, **DEEPSEEK, **FIRST_DENSE, "rope_parameters": {**MROPE,
         "partial_rotary_factor": 1.0}}, "vision_config": {"depth": 1, "hidden_size": 32, "num_heads": 4,
         "image_size": 16, "patch_size": 4, "spatial_merge_size": 2, "out_hidden_size": 32, "intermediate_size": 32,
         "in_channels": 3}, "image_token_id": 120, "video_token_id": 121, "image_start_token_id": 122,
         "image_end_token_id": 123, "video_start_token_id": 124, "video_end_token_id": 125}
    ),
    "glm_moe_dsa": TinyModel(
        "GlmMoeDsaForCausalLM", "GlmMoeDsaConfig",
        {**BASE, **LATENT_ATTENTION, **DEEPSEEK, **INDEXER, **FIRST_DENSE}
    ),
    "glm5_next": TinyModel(
        "Glm5NextForConditionalGeneration", "Glm5NextConfig",
        {"text_config": {**BASE, **LATENT_ATTENTION, "qk_rope_head_dim": 0, **DEEPSEEK, **INDEXER,
         **DENSE_THEN_SPARSE, **LINEAR_THEN_FULL, "linear_head_dim": 8, "linear_num_heads": 4, "hc_mult": 2,
         "hc_sinkhorn_iters": 2, "index_kpool": 4}, "vision_config": {"depth": 1, "hidden_size": 32, "num_heads": 4,
         "intermediate_size": 32, "patch_size": 4, "out_hidden_size": 32}, "image_token_id": 120}
    ),
    "dots1": TinyModel("Dots1ForCausalLM", "Dots1Config", {**BASE, **DEEPSEEK, **FIRST_DENSE}),
    "kimi_linear": TinyModel(
        "KimiLinearForCausalLM", "KimiLinearConfig",
        {**_without(BASE, "max_position_embeddings"), **LATENT_ATTENTION, **EXPERT_GROUPS, **LINEAR_THEN_FULL,
         **DENSE_THEN_SPARSE, "linear_head_dim": 8, "linear_num_heads": 4}
    ),
    "kimi_k25": TinyModel(
        "Kimi_K25ForConditionalGeneration", "Kimi_K25Config",
        {"text_config": {"model_type": "deepseek_v3", **BASE, **LATENT_ATTENTION, **DEEPSEEK, **FIRST_DENSE},
         "vision_config": {**SMALL_VISION, "patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4,
         "pos_emb_time": 1}, "image_token_id": 120}
    ),
    "bailing_hybrid": TinyModel(
        "BailingHybridForCausalLM", "BailingHybridConfig",
        {**_without(BASE, "max_position_embeddings"), **LATENT_ATTENTION, **HEADS, **EXPERT_GROUPS, **FIRST_DENSE,
         **LINEAR_THEN_FULL}
    ),
    "sarvam_moe": TinyModel("Glm4MoeForCausalLM", "SarvamMoEConfig", {**BASE, **HEADS, **DEEPSEEK, **FIRST_DENSE}),
    "sarvam_mla": TinyModel(
        "DeepseekV3ForCausalLM", "SarvamMLAConfig",
        {**BASE, **LATENT_ATTENTION, **DEEPSEEK, **FIRST_DENSE}
    ),
    "exaone_moe": TinyModel(
        "ExaoneMoeForCausalLM", "ExaoneMoeConfig",
        {**BASE, **EXPERTS, **FIRST_DENSE, "n_group": 2, "topk_group": 1}
    ),
    "mimo_v2_flash": TinyModel(
        "MiMoV2FlashForCausalLM", "MiMoV2FlashConfig",
        {**BASE, **HEADS, "v_head_dim": 8, **_without(DEEPSEEK, "n_shared_experts")}
    ),
    "solar_open": TinyModel("SolarOpenForCausalLM", "SolarOpenConfig", {**BASE, **HEADS, **DEEPSEEK}),
    "axk1": TinyModel("AXK1ForCausalLM", "AXK1Config", {**BASE, **LATENT_ATTENTION, **DEEPSEEK}),
    "axk2": TinyModel(
        "AXK2ForCausalLM", "AXK2Config",
        {**BASE, **LATENT_ATTENTION, **DEEPSEEK, **INDEXER, "head_dim": 8, "gated_norm_rank": 4}
    ),
    "mistral4": TinyModel("Mistral4ForCausalLM", "Mistral4Config", {**BASE, **LATENT_ATTENTION, **DEEPSEEK}),
    "mistral_large4": TinyModel(
        "MistralLarge4ForConditionalGeneration", "MistralLarge4Config",
        {"text_config": {**BASE, **LATENT_ATTENTION, **DEEPSEEK, **INDEXER},
         "vision_config": {"model_type": "pixtral", **SMALL_VISION, "image_size": 16, "patch_size": 4},
         "image_token_index": 120}
    ),
    "hy_v4": TinyModel(
        "HYV4ForCausalLM", "HYV4Config",
        {**BASE, **LATENT_ATTENTION, **DEEPSEEK, **INDEXER, "head_dim": 16, "hc_mult": 2}
    ),
    "hy_v4_vl": TinyModel(
        "HYV4VLForConditionalGeneration", "HYV4VLConfig",
        {"text_config": {**BASE, **LATENT_ATTENTION, **DEEPSEEK, **INDEXER, "head_dim": 16, "hc_mult": 2,
         "rope_parameters": MROPE}, "vision_config": {**SMALL_VISION, "patch_size": 4,
         "out_hidden_size": 32}, "image_token_id": 120}
    ),
    "nemotron_h": TinyModel(
        "NemotronHForCausalLM", "NemotronHConfig",
        {**BASE, **HEADS, **ROUTED_EXPERTS, "layers_block_type": ["mamba", "moe", "attention", "moe"],
         "num_hidden_layers": 4, "moe_shared_expert_intermediate_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 16,
         "n_groups": 1, "ssm_state_size": 8, "chunk_size": 16, "use_mamba_kernels": False, "n_group": 1,
         "topk_group": 1, "moe_latent_size": 16}
    ),
}

SIGMOID_PLAIN: dict[str, TinyModel] = {
    "afmoe": TinyModel(
        "AfmoeForCausalLM", "AfmoeConfig",
        {**BASE, **HEADS, **EXPERTS, "num_shared_experts": 1, "num_dense_layers": 1, "route_scale": 1.5}
    ),
    "beam": TinyModel(
        "BeamForCausalLM", "BeamConfig",
        {**BASE, **HEADS, **EXPERTS, **DENSE_THEN_SPARSE, "n_group": 2, "topk_group": 1}
    ),
    "flint": TinyModel(
        "FlintForCausalLM", "FlintConfig",
        {**BASE, **HEADS, **EXPERTS, **SHARED, "mlp_only_layers": [0]}
    ),
    "hy_v3": TinyModel("HYV3ForCausalLM", "HYV3Config", {**BASE, **HEADS, **EXPERTS, "num_shared_experts": 1}),
    "minimax_m2": TinyModel("MiniMaxM2ForCausalLM", "MiniMaxM2Config", {**BASE, **HEADS, **LOCAL_EXPERTS}),
    "minimax_m3_vl_text": TinyModel(
        "MiniMaxM3VLForCausalLM", "MiniMaxM3VLTextConfig",
        {**BASE, **HEADS, **LOCAL_EXPERTS, **DENSE_THEN_SPARSE, "rotary_dim": 4, "dense_intermediate_size": 32,
         "shared_intermediate_size": 16, "index_n_heads": 2, "index_head_dim": 8, "index_block_size": 8,
         "index_topk_blocks": 2}
    ),
    "laguna": TinyModel(
        "LagunaForCausalLM", "LagunaConfig",
        {**BASE, **HEADS, **EXPERTS, **SHARED, "moe_routed_scaling_factor": 2.0}
    ),
    "lfm2_moe": TinyModel(
        "Lfm2MoeForCausalLM", "Lfm2MoeConfig",
        {**BASE, **EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]}
    ),
    "kolibri1": TinyModel("Kolibri1ForCausalLM", "Kolibri1Config", {**BASE, **HEADS, **EXPERTS, **SHARED}),
    "muse_spark": TinyModel(
        "MuseSparkForConditionalGeneration", "MuseSparkConfig",
        {"text_config": {**BASE, **HEADS, **LOCAL_EXPERTS, "moe_intermediate_size": 16, "moe_hidden_size": 16,
         "output_multiplier": 1.0}, "vision_config": {**SMALL_VISION, "patch_size": 4, "out_hidden_size": 32},
         "audio_config": {**SMALL_VISION, "out_hidden_size": 32, "patch_sizes": [2], "hidden_sizes": [32],
         "depths": [1]}, "out_hidden_size": 32, "projector_hidden_size": 32}
    ),
    "inkling_text": TinyModel(
        "InklingForCausalLM", "InklingTextConfig",
        {**BASE, **HEADS, **ROUTED_EXPERTS, **DENSE_THEN_SPARSE, "n_shared_experts": 1, "swa_num_attention_heads": 4,
         "swa_num_key_value_heads": 2, "swa_head_dim": 8, "d_rel": 4, "rel_extent": 64, "sliding_window_size": 16,
         "logits_mup_width_multiplier": 1.0}
    ),
    "inkling2_text": TinyModel(
        "Inkling2ForCausalLM", "Inkling2TextConfig",
        {**_without(BASE, "intermediate_size"), **HEADS, **ROUTED_EXPERTS, "swa_num_attention_heads": 4,
         "swa_num_key_value_heads": 2, "swa_head_dim": 8, "d_rel": 4, "rel_extent": 64, "sliding_window_size": 16,
         "unpadded_vocab_size": 128}
    ),
    "step3p7": TinyModel(
        "Step3p7ForConditionalGeneration", "Step3p7Config",
        {"text_config": {**BASE, **HEADS, **ROUTED_EXPERTS, **DENSE_THEN_SPARSE, "share_expert_dim": 16,
         "moe_router_scaling_factor": 2.0, "sliding_window": 16}, "vision_config": {**SMALL_VISION, "image_size": 16,
         "patch_size": 4}, "image_token_id": 120}
    ),
}

# Families outside the shared experts contract, or with rows or slots that are not experts.
SPECIAL: dict[str, TinyModel] = {
    "llama4_text": TinyModel(
        "Llama4ForCausalLM", "Llama4TextConfig",
        {**BASE, **HEADS, **LOCAL_EXPERTS, "intermediate_size_mlp": 48, "moe_layers": [1], "attention_chunk_size": 64}
    ),
    "longcat_flash": TinyModel(
        "LongcatFlashForCausalLM", "LongcatFlashConfig",
        {**_without(BASE, "num_hidden_layers", "intermediate_size"), **LATENT_ATTENTION, **HEADS, "num_layers": 1,
         "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "n_routed_experts": 8, "zero_expert_num": 4,
         "moe_topk": 2}
    ),
    "jetmoe": TinyModel(
        "JetMoeForCausalLM", "JetMoeConfig",
        {**_without(BASE, "num_attention_heads"), **LOCAL_EXPERTS, "kv_channels": 8}
    ),
    "dbrx": TinyModel(
        "DbrxForCausalLM", "DbrxConfig",
        {"vocab_size": 128, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 512, "initializer_range": 0.2,
         "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}, "ffn_config": {"ffn_hidden_size": 16,
         "moe_num_experts": 8, "moe_top_k": 2, "hidden_size": 32}}
    ),
    "zaya": TinyModel(
        "ZayaForCausalLM", "ZayaConfig",
        {**BASE, **HEADS, **EXPERTS, "num_experts_per_tok": 1, "router_hidden_size": 16}
    ),  # top-1
    "switch_transformers": TinyModel(
        "SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig",
        {"vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 4, "num_experts": 8,
         "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "decoder_start_token_id": 0,
         "expert_capacity": 64}
    ),
    "nllb_moe": TinyModel(
        "NllbMoeForConditionalGeneration", "NllbMoeConfig",
        {"vocab_size": 128, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "encoder_sparse_step": 2,
         "decoder_sparse_step": 2, "num_experts": 8, "expert_capacity": 64, "decoder_start_token_id": 0,
         "max_position_embeddings": 64}
    ),
    "doge": TinyModel(
        "DogeForCausalLM", "DogeConfig",
        {**BASE, "is_moe": True, "num_experts": 64, "num_experts_per_tok": 2}
    ),  # 64 = 8 x 8 product keys
}

# Multimodal models around a text model of another row.
WRAPPERS: dict[str, TinyModel] = {
    "llama4": TinyModel(
        "Llama4ForConditionalGeneration", "Llama4Config",
        {"text_config": SPECIAL["llama4_text"].options, "vision_config": {**SMALL_VISION, "image_size": 16,
         "patch_size": 4, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
         "boi_token_index": 120, "eoi_token_index": 121, "image_token_index": 122}
    ),
    "gemma4": TinyModel(
        "Gemma4ForConditionalGeneration", "Gemma4Config",
        {"text_config": SOFTMAX["gemma4_text"].options, "vision_config": {**SMALL_VISION, "num_key_value_heads": 4,
         "head_dim": 8, "patch_size": 4}, "audio_config": None, "image_token_id": 120, "video_token_id": 121,
         "audio_token_id": 122, "boi_token_id": 123, "eoi_token_id": 124, "boa_token_id": 125, "eoa_token_id": 126}
    ),
    "minimax_m3_vl": TinyModel(
        "MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3VLConfig",
        {"text_config": SIGMOID_PLAIN["minimax_m3_vl_text"].options, "vision_config": {**SMALL_VISION,
         "image_size": 16, "patch_size": 4}, "image_token_index": 120, "video_token_index": 121}
    ),
    "aria": TinyModel(
        "AriaForConditionalGeneration", "AriaConfig",
        {"text_config": SOFTMAX["aria_text"].options, "vision_config": {"model_type": "idefics3_vision",
         **SMALL_VISION, "image_size": 16, "patch_size": 4}, "image_token_index": 120}
    ),
    "inkling_mm_model": TinyModel(
        "InklingForConditionalGeneration", "InklingConfig",
        {"text_config": SIGMOID_PLAIN["inkling_text"].options, "vision_config": {"text_hidden_size": 32,
         "patch_size": 8, "n_layers": 2, "hidden_size": 16}, "audio_config": {"text_hidden_size": 32}}
    ),
    "inkling2": TinyModel(
        "Inkling2ForConditionalGeneration", "Inkling2Config",
        {"text_config": SIGMOID_PLAIN["inkling2_text"].options, "vision_config": {**SMALL_VISION, "patch_size": 4,
         "text_hidden_size": 32}}
    ),
    "qwen4_exp": TinyModel(
        "Qwen4ExpForConditionalGeneration", "Qwen4ExpConfig",
        {"text_config": SOFTMAX["qwen4_exp_text"].options, "vision_config": QWEN_VISION, **QWEN_MEDIA,
         "vision_end_token_id": 123}
    ),
}

# One dense model, which every verb must refuse with words.
DENSE: dict[str, TinyModel] = {"qwen3": TinyModel("Qwen3ForCausalLM", "Qwen3Config", {**BASE, **HEADS})}

TINY: dict[str, TinyModel] = {**SOFTMAX, **SIGMOID_GROUPS, **SIGMOID_PLAIN, **SPECIAL, **WRAPPERS}
# fmt: on
