"""The criterion `hope`: the interaction matrix F, what pruning two experts together costs (arXiv:2609.18916)."""

from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from moeprune.artifacts.statistics import LayerStatistics
from moeprune.selection.criteria.criterion import Criterion, LayerEvidence
from moeprune.selection.objective import Quadratic

Product = Literal["norms", "outputs"]
Normalise = Literal["co_selected", "all_tokens"]


def interaction(
    statistics: LayerStatistics,
    *,
    product: Product,
    normalise: Normalise,
    pairwise: bool = True,
    shrinkage: float = 0.0,
) -> np.ndarray:
    """Pairwise cost of pruning two experts together, F (experts, experts), float64, symmetric.

    F_ij = sum over tokens that select both of g_i n_i g_j n_j (product="norms", >= 0) or of <g_i f_i, g_j f_j>
    (product="outputs"), divided by the number of those tokens (normalise="co_selected": Eq. 3 of arXiv:2609.18916;
    indefinite as a rule) or of all counted tokens ("all_tokens": a Gram matrix, positive semidefinite). Pairs that
    never fired together are 0. pairwise=False keeps the diagonal alone.

    `shrinkage` is a number of tokens: for "norms" over "co_selected" every off-diagonal mean is drawn towards
    mean(g_i n_i) mean(g_j n_j) as if that many tokens had shown it; the diagonal stays.
    Re-routing after pruning is not modelled. Raises ValueError when the layer saw no token.
    """
    tokens = float(statistics.tokens)
    if not tokens > 0:
        raise ValueError("no counted token")
    sums = np.asarray(statistics.norm_product if product == "norms" else statistics.output_product, dtype=np.float64)
    pairs = np.asarray(statistics.co_count, dtype=np.float64)
    if normalise == "all_tokens":
        matrix = sums / tokens
    elif shrinkage > 0 and product == "norms":
        matrix = _shrunk(sums, pairs, np.asarray(statistics.gated_norm_sum, dtype=np.float64), shrinkage)
    else:
        matrix = np.divide(sums, pairs, out=np.zeros_like(sums), where=pairs > 0)
    matrix = (matrix + matrix.T) / 2
    return matrix if pairwise else np.diag(np.diagonal(matrix))


def _shrunk(sums: np.ndarray, pairs: np.ndarray, gated_norm_sum: np.ndarray, shrinkage: float) -> np.ndarray:
    """(sum + k m_i m_j) / (count + k) off the diagonal, m = mean gated norm of an expert, 0 where it never fired."""
    count = np.diagonal(pairs)
    mean = np.divide(gated_norm_sum, count, out=np.zeros_like(gated_norm_sum), where=count > 0)
    matrix = (sums + shrinkage * np.outer(mean, mean)) / (pairs + shrinkage)
    own = np.divide(np.diagonal(sums), count, out=np.zeros_like(mean), where=count > 0)
    np.fill_diagonal(matrix, own)
    return matrix


class Hope(Criterion):
    """p' F p with the interaction matrix F (HOPE, arXiv:2609.18916).

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
