"""Tiny real models of every MoE family: random weights, seconds to build, nothing downloaded.

from tests.tiny import TINY, build, inputs, save_tiny, tiny_tokenizer

model = build("deepseek_v3", seed=1, num_hidden_layers=3)       # any option of the family's config can be overridden
logits = model(**inputs("deepseek_v3")).logits
directory = save_tiny("qwen3_moe", tmp_path, dtype="bfloat16", shard_size="40KB")
"""

import json
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import nn

from tests.tiny_table import DENSE, TINY, WRAPPERS, TinyModel
from tests.tiny_tokenizer import tiny_tokenizer

__all__ = ["DENSE", "TINY", "WRAPPERS", "TinyModel", "build", "inputs", "save_tiny", "tiny_tokenizer"]

ENCODER_DECODER = ("switch_transformers", "nllb_moe")
CORRECTION_BIASES = ("e_score_correction_bias", "expert_bias", "balancing_biases")
# In transformers 5.24 its multimodal class fails without images; the auto class loads its text model.
NO_TEXT_ALONE = ("llama4",)
# transformers 5 saves these model types' `num_experts` under another name than their hub checkpoints have.
SAVED_AS_LOCAL_EXPERTS = ("qwen3_moe", "qwen3_vl_moe_text", "mellum", "kolibri1")


def build(name: str, *, seed: int = 0, **overrides: Any) -> Any:
    """The tiny model of a family (or DENSE's) in eval mode, float32, CPU; the same arguments give the same weights.

    Overrides are options of the config; in a multimodal family those it does not have itself go to its text config.
    Weights are large enough that routing is uneven and that a missing expert shows in the logits; whatever starts at
    zero on purpose (biases, correction biases) is random here, so that code that forgets it fails.
    """
    row = {**TINY, **DENSE}[name]
    config = getattr(transformers, row.config_class)(**_overridden(row.options, overrides))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = getattr(transformers, row.model_class)(config).eval()
        _fill_zeros(model)
    return model


def inputs(name: str, *, batch: int = 2, length: int = 24, seed: int = 3) -> dict[str, torch.Tensor]:
    """Random `input_ids` (batch, length) int64 for `model(**inputs(name))`: ordinary tokens, no padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(10, 100, (batch, length), generator=generator)
    return {"input_ids": ids, "decoder_input_ids": ids[:, :8]} if name in ENCODER_DECODER else {"input_ids": ids}


def save_tiny(
    name: str,
    directory: Path | str,
    *,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    shard_size: str | None = None,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """The directory, now holding the tiny model as a hub checkpoint: model files, config, tokenizer, generation config.

    `shard_size` ("40KB") splits the weights over several files with an index. Expert tensors have their hub names, and
    config.json has the keys that hub checkpoints have rather than those that transformers 5 would write.
    Correction biases stay float32 beside 16-bit weights, as hub checkpoints keep them.
    """
    directory = Path(directory)
    model = build(name, seed=seed, **overrides)
    _cast(model, getattr(torch, dtype))
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=1, eos_token_id=tiny_tokenizer().eos_token_id, pad_token_id=0, do_sample=False
    )
    model.save_pretrained(directory, max_shard_size=shard_size or "1GB")
    tiny_tokenizer().save_pretrained(directory)
    path = directory / "config.json"
    config = _hub_config(json.loads(path.read_text()))
    path.write_text(json.dumps(config, indent=2) + "\n")
    return directory


def _overridden(options: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    text = options.get("text_config")
    if text is None:
        return {**options, **overrides}
    own = {key: value for key, value in overrides.items() if key in options}
    rest = {key: value for key, value in overrides.items() if key not in options}
    return {**options, "text_config": {**text, **rest}, **own}


def _fill_zeros(model: nn.Module) -> None:
    """Random values for correction biases, for every parameter that is all zero, and for DeepSeek-V4's hash table."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        leaf = name.rpartition(".")[2]
        if leaf == "tid2eid":  # token id -> its experts, (vocabulary, top_k)
            rows = [torch.randperm(8)[: tensor.shape[1]] for _ in range(tensor.shape[0])]
            tensor.copy_(torch.stack(rows))
        elif leaf in CORRECTION_BIASES or (isinstance(tensor, nn.Parameter) and not tensor.any()):
            tensor.copy_(torch.randn(tensor.shape) * 0.1)


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and name.rpartition(".")[2] not in CORRECTION_BIASES:
            tensor.data = tensor.data.to(dtype)
    model.config.dtype = dtype


def _hub_config(config: dict[str, Any]) -> dict[str, Any]:
    """A config as hub checkpoints have it: `num_experts`, `rope_theta`, `rope_scaling` and `torch_dtype`."""
    config = {
        key: _hub_config(value) if isinstance(value, dict) and "model_type" in value else value
        for key, value in config.items()
    }
    if config.get("model_type") in SAVED_AS_LOCAL_EXPERTS:
        config["num_experts"] = config.pop("num_local_experts")
    if "dtype" in config:
        config["torch_dtype"] = config.pop("dtype")
    rope = config.get("rope_parameters")
    if rope and "rope_theta" in rope:  # a flat one; models with one set of parameters a layer type keep theirs
        rope = dict(config.pop("rope_parameters"))
        config["rope_theta"] = rope.pop("rope_theta")
        if "partial_rotary_factor" in rope:
            config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        config["rope_scaling"] = None if rope == {"rope_type": "default"} else rope
    return dict(sorted(config.items()))
