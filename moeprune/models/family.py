"""One row of the table of MoE families: what can differ between them, and the routers' rules in words."""

from dataclasses import dataclass
from typing import Literal

SOFTMAX_RENORM = "softmax over all experts, top-k, renormalised"
SOFTMAX_OPTIONAL = "softmax over all experts, top-k, renormalised if norm_topk_prob"
SIGMOID_GROUPS = (
    "sigmoid, top-k of score + correction bias inside the best groups (top-2 sum), gate = score, "
    "renormalised if norm_topk_prob, times routed_scaling_factor"
)
SOFTMAX_PLAIN = "softmax over all experts, top-k, not renormalised"
SOFTMAX_BIAS = "softmax over all experts, top-k of score + bias, gate = score, renormalised"
SOFTMAX_GROUPS = "softmax, top-k inside the best groups, times routed_scaling_factor"
SOFTMAX_GROUPS_RENORM = "softmax, top-k inside the best groups, renormalised, times routed_scaling_factor"
TOP_K_SOFTMAX = "top-k of the logits, softmax over those"
SPARSEMIXER = "two sequential masked softmaxes (sparsemixer), top-2"
SIGMOID = "sigmoid, top-k, renormalised if norm_topk_prob"
SIGMOID_BIAS = "sigmoid, top-k of score + correction bias, gate = score, renormalised, times a scaling factor"
SIGMOID_BIAS_OUTSIDE = "sigmoid, top-k of score + correction bias, gate = score, renormalised; a factor on the sum"
SIGMOID_GROUPS_OUTSIDE = (
    "sigmoid, top-k of score + correction bias inside the best groups (top-2 sum), gate = score, renormalised; "
    "a factor on the sum"
)
LOGIT_BIAS = "top-k of logit + correction bias, gate = sigmoid(logit), renormalised if norm_topk_prob"

# Keys of config.json under all their names, and sections of it that describe the language model: the others (vision,
# audio, a talker) have counts of their own.
COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "mtp_num_layers", "num_mtp_modules")
TEXT_SECTIONS = ("text_config", "language_config", "llm_config", "thinker_config")

_SCORING: dict[str, Literal["softmax", "sigmoid"]] = {
    **dict.fromkeys((SOFTMAX_RENORM, SOFTMAX_OPTIONAL, SOFTMAX_PLAIN, TOP_K_SOFTMAX), "softmax"),
    **dict.fromkeys((SOFTMAX_GROUPS, SOFTMAX_GROUPS_RENORM), "softmax"),
    **dict.fromkeys((SIGMOID_GROUPS, SIGMOID_GROUPS_OUTSIDE, SIGMOID, SIGMOID_BIAS, SIGMOID_BIAS_OUTSIDE), "sigmoid"),
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
    # What becomes of the experts' gated sum, by attributes of the block; "" where the block has none:
    projection: str = ""  # the linear map to the hidden size, where experts work in a latent space
    post_scale: str = ""  # the factor on the sum
    normalised_by: str = ""  # the norm of all parts' sum
    bare: bool = False  # there is no block: experts and router lie in the decoder layer itself
    # What is not an expert, or not stored as one:
    config_section: str = ""  # section of the text config that holds the counts
    extra_classes: str | int = 0  # rows after the experts' that belong to none: their number, or its config key
    null_slots: Literal["", "classes", "zero_gates"] = ""  # slots that go to no expert: to those classes, or of gate 0
    expert_table: str = ""  # buffer of the router that lists experts by token: its values are expert ids
    flat_rows: bool = False  # experts are runs of rows of a matrix
    reads_config: bool = False  # the forward pass reads the number of experts from the config
    single_slots: bool = True  # its experts can be called with one slot a token
    gates_input: bool = False  # the gate multiplies an expert's input
    inside: tuple[str, ...] = ()  # model types of multimodal configs whose text config is of this family
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
        """How the family is served: "generic", "special: what is", or "refused: reason"; and in which other ones."""
        if self.refused:
            return f"refused: {self.refused}"
        special = [text for field, text in _SPECIAL.items() if getattr(self, field)]
        how = f"special: {', '.join(special)}" if special else "generic"
        return f"{how}; also inside {', '.join(self.inside)}" if self.inside else how


_SPECIAL = {
    "gates_input": "the gate multiplies the input",
    "projection": "experts in a latent space",
    "post_scale": "a factor outside the experts",
    "extra_classes": "router classes that are no experts",
    "expert_table": "experts listed by token",
    "flat_rows": "experts are runs of rows",
    "bare": "no block of its own",
    "normalised_by": "the sum is normalised",
}
