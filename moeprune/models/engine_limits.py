"""What serving engines ask of a pruned MoE: pure functions of its config.json and of the number of experts left.

Facts of engines, each with the release or the report it was read from; a note names the engine and the way out.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from moeprune.models.family import MTP_KEYS, TEXT_SECTIONS

SPLITS = (2, 4, 8, 16, 32, 64)  # devices people share a model over
GROUP_KEYS = (("n_group", "topk_group"), ("num_expert_group", "topk_group"))

# Counts that vLLM 0.32 carries tuned configurations of its fused MoE kernel for, on any device.
VLLM_TUNED = frozenset({1, 8, 16, 20, 32, 40, 60, 62, 64, 72, 128, 129, 160, 256, 384, 512})
# Counts that the softplus router kernel of DeepSeek-V4 is compiled for (vllm#50982: 160 refused, vllm#51521: 144).
VLLM_SOFTPLUS_COUNTS = frozenset({1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 576})
SOFTPLUS_FAMILIES = frozenset({"deepseek_v4"})
LLAMA_CPP_MOST = 1024  # LLAMA_MAX_EXPERTS

# (text that a chat template has, vLLM's tool parser); the first that fits.
TOOL_PARSERS = (
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<|channel|>", "openai"),
    ("<minimax:tool_call>", "minimax_m2"),
)
# (part of the model type, vLLM's reasoning parser), for templates that know about thinking.
REASONING_PARSERS = (
    ("gpt_oss", "openai_gptoss"),
    ("qwen3", "qwen3"),
    ("glm4", "glm45"),
    ("deepseek", "deepseek_r1"),
    ("minimax_m2", "minimax_m2"),
    ("kimi", "kimi_k2"),
)


@dataclass(frozen=True)
class Note:
    """Something an engine does with this model that people do not expect."""

    engine: str
    effect: Literal["refuses", "slower", "advice"]
    text: str  # what happens, and the way out

    def __str__(self) -> str:
        return f"{self.engine}: {self.text}"


def notes(config: Mapping[str, Any], counts: Sequence[int], *, top_k: int) -> tuple[Note, ...]:
    """Everything worth knowing before this model is served; the gravest first.

    `config` is the pruned config.json, `counts` the experts left in each MoE layer.
    """
    notes: list[Note] = []
    uniform = len(set(counts)) == 1
    if not uniform:
        notes.append(
            Note(
                "every engine",
                "refuses",
                f"layers keep different numbers of experts ({min(counts)} to {max(counts)}), which config.json cannot "
                "say; set selection.budget.scope: layer, or evaluate the plan in memory",
            )
        )
    count = min(counts)
    notes += _reachability(config, count, top_k)
    notes += _kernels(config, count)
    notes += _speculation(config)
    if uniform:
        notes += _parallel(config, count)
    order = ("refuses", "slower", "advice")
    return tuple(sorted(notes, key=lambda note: order.index(note.effect)))


def _reachability(config: Mapping[str, Any], count: int, top_k: int) -> Iterable[Note]:
    if count < top_k:
        yield Note(
            "every engine",
            "refuses",
            f"{count} experts are left but the router picks {top_k}; lower selection.budget.prune",
        )
    elif count == top_k:
        yield Note(
            "every engine",
            "advice",
            f"all {count} experts are used for every token, the router only weighs them; lower selection.budget.prune "
            "to leave it a choice",
        )
    groups, used = router_groups(config)
    if groups <= 1:
        return
    if count % groups:
        yield Note(
            "vLLM",
            "refuses",
            f"{count} experts do not divide into the router's {groups} groups, and vLLM then routes without groups; "
            f"set selection.budget.multiple_of: {groups}",
        )
    elif used * (count // groups) < top_k:
        yield Note(
            "every engine",
            "refuses",
            f"{used} groups of {count // groups} experts cannot give the {top_k} that the router picks; "
            "lower selection.budget.prune",
        )


def _kernels(config: Mapping[str, Any], count: int) -> Iterable[Note]:
    model_type = str(text_config(config).get("model_type") or config.get("model_type", ""))
    if model_type in SOFTPLUS_FAMILIES and count not in VLLM_SOFTPLUS_COUNTS:
        near = max((n for n in VLLM_SOFTPLUS_COUNTS if n <= count), default=1)
        yield Note(
            "vLLM on CUDA",
            "refuses",
            f"its router kernel for this family is not compiled for {count} experts (vllm#50982); keep {near}, or use "
            "a release with the fallback",
        )
    if count > LLAMA_CPP_MOST:
        yield Note(
            "llama.cpp", "refuses", f"loads at most {LLAMA_CPP_MOST} experts, {count} are left; serve it with vLLM"
        )
    if count not in VLLM_TUNED:
        yield Note(
            "vLLM on GPUs",
            "slower",
            f"release 0.32 has no tuned fused-MoE configuration for {count} experts, and a smaller model can then "
            "serve slower; tune one with its benchmarks/kernels/benchmark_moe.py --tune, or keep a count that has one "
            f"({', '.join(map(str, _around(count)))})",
        )


def _around(count: int) -> list[int]:
    """The tuned counts next below and above."""
    below = [n for n in sorted(VLLM_TUNED) if n < count][-1:]
    return below + [n for n in sorted(VLLM_TUNED) if n > count][:1]


def _speculation(config: Mapping[str, Any]) -> Iterable[Note]:
    for key in MTP_KEYS:
        layers = next((section[key] for section in _sections(config) if section.get(key)), 0)
        if layers:
            yield Note(
                "vLLM, SGLang",
                "advice",
                f"config.json still says {key}: {layers}, whose layers a pruned checkpoint does not have; serve it "
                "without speculative decoding by them",
            )


def _parallel(config: Mapping[str, Any], count: int) -> Iterable[Note]:
    missing = [n for n in (2, 4, 8) if count % n and n <= count]
    if missing:
        yield Note(
            "vLLM, SGLang",
            "advice",
            f"expert parallelism over {' or '.join(map(str, missing))} devices does not divide {count} experts "
            f"(vllm#52435); set selection.budget.multiple_of: {max(missing)} if you need it",
        )


@dataclass(frozen=True)
class ParallelSizes:
    """Numbers of devices over which engines can split the model evenly, 1 left out."""

    tensor: tuple[int, ...]
    expert: tuple[int, ...]


def parallel_sizes(config: Mapping[str, Any], count: int) -> ParallelSizes:
    """Tensor parallelism divides attention heads and every expert's width, expert parallelism the number of experts."""
    text = text_config(config)
    heads = int(text.get("num_attention_heads") or 0)
    groups = int(text.get("num_key_value_heads") or heads)
    widths = [int(text[key]) for key in ("moe_intermediate_size", "expert_ffn_hidden_size") if text.get(key)]
    widths = widths or [int(text.get("intermediate_size") or 0)]

    def splits(n: int) -> bool:
        latent = bool(text.get("kv_lora_rank"))  # latent attention has one shared key, copied to every device
        keys = latent or groups % n == 0 or n % groups == 0
        return heads > 0 and heads % n == 0 and keys and all(width % n == 0 for width in widths)

    return ParallelSizes(
        tensor=tuple(n for n in SPLITS if splits(n)),
        expert=tuple(n for n in SPLITS if n <= count and count % n == 0),
    )


def router_groups(config: Mapping[str, Any]) -> tuple[int, int]:
    """(groups of experts, groups a token may draw from); (1, 1) for routers without groups."""
    text = text_config(config)
    for key, used in GROUP_KEYS:
        if text.get(key):
            return int(text[key]), int(text.get(used) or text[key])
    return 1, 1


def serve_flags(config: Mapping[str, Any], chat_template: str | None) -> list[str]:
    """Options of `vllm serve` that tool calls and reasoning need, read off the chat template."""
    if not chat_template:
        return []
    flags = []
    tool = next((parser for mark, parser in TOOL_PARSERS if mark in chat_template), None)
    if tool and "tools" in chat_template:
        flags += ["--enable-auto-tool-choice", "--tool-call-parser", tool]
    model_type = str(text_config(config).get("model_type") or config.get("model_type", ""))
    thinks = "<think>" in chat_template or "enable_thinking" in chat_template or model_type == "gpt_oss"
    reasoning = next((parser for part, parser in REASONING_PARSERS if part in model_type), None)
    if thinks and reasoning:
        flags += ["--reasoning-parser", reasoning]
    return flags


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section about the language model: the document itself, or the innermost text section."""
    for key in TEXT_SECTIONS:
        if isinstance(config.get(key), Mapping):
            return text_config(config[key])
    return config


def _sections(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    text = text_config(config)
    return [config] if text is config else [config, text]
