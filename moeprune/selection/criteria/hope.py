"""HOPE: the cost of pruning experts together, from what they did together."""

from typing import Literal

from pydantic import Field, model_validator

from moeprune.selection.criterion import Criterion
from moeprune.selection.evidence import LayerEvidence
from moeprune.selection.interaction import Normalise, Product, interaction
from moeprune.selection.objective import Quadratic


class Hope(Criterion):
    """p' F p with the interaction matrix F of selection.interaction (HOPE, arXiv:2609.18916).

    norms over all_tokens is the F of the paper's theorem, norms over co_selected the F of its experiments, outputs over
    all_tokens the exact error of dropping experts without re-routing. pairwise: false is the same quantity, diagonal
    only. `shrinkage` (tokens) steadies rare pairs of norms over co_selected.
    """

    name: Literal["hope"] = "hope"
    product: Product = "norms"
    normalise: Normalise = "all_tokens"
    pairwise: bool = True
    shrinkage: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _shrinkage_has_an_effect(self) -> "Hope":
        if self.shrinkage and (self.product, self.normalise, self.pairwise) != ("norms", "co_selected", True):
            raise ValueError(
                f"shrinkage={self.shrinkage} steadies pairs of product=norms, normalise=co_selected only; set it to 0"
            )
        return self

    def objective(self, evidence: LayerEvidence) -> Quadratic:
        return Quadratic(
            interaction(
                evidence.statistics,
                product=self.product,
                normalise=self.normalise,
                pairwise=self.pairwise,
                shrinkage=self.shrinkage,
            )
        )

    def layer_scale(self, evidence: LayerEvidence) -> float:
        """1' norm_product 1 / tokens: the mean square of the layer's summed gated norms, whatever F is used."""
        return float(evidence.statistics.norm_product.sum()) / float(evidence.statistics.tokens)

    def warnings(self, evidence: LayerEvidence) -> list[str]:
        if evidence.layer.top_k == 1 and self.pairwise:
            return [f"{evidence.layer.name}: top_k is 1, so no pair of experts fires together: hope is reap_l2 here"]
        return []
