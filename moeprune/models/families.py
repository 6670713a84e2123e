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

_ROWS = (
    Family("qwen3_moe", SOFTMAX_OPTIONAL, verified=True),
    Family("qwen3_next", SOFTMAX_OPTIONAL, verified=True),
    Family("mixtral", SOFTMAX_RENORM, verified=True),
    Family("olmoe", SOFTMAX_OPTIONAL, verified=True),
    Family("deepseek_v3", **_DEEPSEEK),  # type: ignore[arg-type]
    Family("glm4_moe", **_DEEPSEEK),  # type: ignore[arg-type]
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
