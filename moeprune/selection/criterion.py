"""What a criterion is: options that turn the evidence of one layer into an objective."""

from typing import ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict

from moeprune.selection.evidence import LayerEvidence
from moeprune.selection.objective import Modular, Objective


class Criterion(BaseModel):
    """A criterion's options; `objective` does the work."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    needs: ClassVar[tuple[str, ...]] = ()  # beyond the default statistics (calibration.statistics: all or samples)

    def objective(self, evidence: LayerEvidence) -> Objective:
        raise NotImplementedError

    def layer_scale(self, evidence: LayerEvidence) -> float:
        """What this layer's costs are divided by to compare layers: here the cost of pruning every expert."""
        return self.objective(evidence).cost(np.ones(evidence.layer.num_experts, dtype=bool))

    def warnings(self, evidence: LayerEvidence) -> list[str]:
        return []


class FirstOrder(Criterion):
    """A criterion that scores every expert on its own; the cost of a set is the sum of its scores."""

    def scores(self, evidence: LayerEvidence) -> np.ndarray:
        """Saliency (experts,), float64; the lowest are pruned."""
        raise NotImplementedError

    def objective(self, evidence: LayerEvidence) -> Modular:
        return Modular(np.where(evidence.dead, 0.0, np.asarray(self.scores(evidence), dtype=np.float64)))


def mean_over_routed(sums: np.ndarray, evidence: LayerEvidence) -> np.ndarray:
    """sums / N_e (experts,), 0 where the expert was never routed."""
    count = np.asarray(evidence.statistics.count, dtype=np.float64)
    return np.divide(sums, count, out=np.zeros(len(count)), where=count > 0)
