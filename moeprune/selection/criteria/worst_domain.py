"""The criterion `worst_domain`: no domain may pay much more than the others."""

from typing import Literal

import numpy as np
from pydantic import Field

from moeprune.selection.criteria.criterion import Criterion, LayerEvidence
from moeprune.selection.criteria.hope import Normalise, Product, interaction
from moeprune.selection.objective import Quadratic, WorstOf


class WorstDomain(Criterion):
    """max over domains d of p' F_d p / 1' F_d 1, with F_d the interaction matrix of HOPE on domain d alone.

    Each domain's cost is a share of what pruning every expert of the layer would cost it, so a domain of few tokens or
    small outputs counts as much as any other. With emphasis a the cost is a times the worst share plus 1 - a times the
    mean share. `selection.mix` only says which domains take part (weight 0: not).
    """

    name: Literal["worst_domain"] = "worst_domain"
    product: Product = "norms"
    normalise: Normalise = "all_tokens"
    emphasis: float = Field(default=1.0, ge=0, le=1)  # 1: the worst domain alone; 0: the mean over domains

    def objective(self, evidence: LayerEvidence) -> WorstOf:
        matrices = [
            interaction(statistics, product=self.product, normalise=self.normalise)
            for statistics in evidence.domains.values()
            if float(statistics.tokens) > 0
        ]
        shares = [matrix / total for matrix in matrices if (total := float(matrix.sum())) > 0]
        if not shares:
            return WorstOf((Quadratic(np.zeros((evidence.layer.num_experts, evidence.layer.num_experts))),))
        # The mean is the same for every domain, so it can go into each: max_d (a f_d + (1 - a) mean) = a max + ...
        mean = np.mean(shares, axis=0)
        return WorstOf(tuple(Quadratic(self.emphasis * share + (1 - self.emphasis) * mean) for share in shares))
