"""First-order criteria: a score per expert, the lowest are pruned.

Sums and symbols as in artifacts.statistics: g is the gate, n = ||f|| the norm of an expert's output, N_e the number of
tokens routed to expert e. An expert that was never routed scores 0.
"""

import zlib
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from moeprune.artifacts.errors import InputError
from moeprune.selection.criteria.criterion import FirstOrder, LayerEvidence, mean_over_routed


class Random(FirstOrder):
    """Uniform scores in [0, 1): the control. Different in every layer, the same for the same seed and layer name."""

    name: Literal["random"] = "random"
    seed: int = Field(default=0, ge=0)

    def scores(self, evidence: LayerEvidence) -> np.ndarray:
        source = np.random.default_rng([self.seed, zlib.crc32(evidence.layer.name.encode())])
        return source.random(evidence.layer.num_experts)


class Frequency(FirstOrder):
    """N_e (a baseline of arXiv:2510.13999)."""

    name: Literal["frequency"] = "frequency"

    def scores(self, evidence: LayerEvidence) -> np.ndarray:
        return np.asarray(evidence.statistics.count)


class GateSum(FirstOrder):
    """sum g, the soft frequency of SEER-MoE (arXiv:2404.05089)."""

    name: Literal["gate_sum"] = "gate_sum"

    def scores(self, evidence: LayerEvidence) -> np.ndarray:
        return evidence.statistics.gate_sum


class Ean(FirstOrder):
    """sum n (a baseline of arXiv:2510.13999)."""

    name: Literal["ean"] = "ean"

    def scores(self, evidence: LayerEvidence) -> np.ndarray:
        return evidence.statistics.norm_sum


class Man(FirstOrder):
    """sum n / N_e (arXiv:2606.15716)."""

    name: Literal["man"] = "man"

    def scores(self, evidence: LayerEvidence) -> np.ndarray:
        return mean_over_routed(evidence.statistics.norm_sum, evidence)


class Msan(FirstOrder):
    """sum n^2 / N_e (arXiv:2606.15716)."""

    name: Literal["msan"] = "msan"

    def scores(self, evidence: LayerEvidence) -> np.ndarray:
        return mean_over_routed(evidence.statistics.norm_square_sum, evidence)


class WeightedEan(FirstOrder):
    """sum g n (arXiv:2510.13999)."""

    name: Literal["weighted_ean"] = "weighted_ean"

    def scores(self, evidence: LayerEvidence) -> np.ndarray:
        return evidence.statistics.gated_norm_sum


class Reap(FirstOrder):
    """sum g n / N_e (REAP, arXiv:2510.13999)."""

    name: Literal["reap"] = "reap"

    def scores(self, evidence: LayerEvidence) -> np.ndarray:
        return mean_over_routed(evidence.statistics.gated_norm_sum, evidence)


class ReapL2(FirstOrder):
    """sum g^2 n^2 / N_e, the diagonal of HOPE's F (arXiv:2609.18916, section 3.5)."""

    name: Literal["reap_l2"] = "reap_l2"

    def scores(self, evidence: LayerEvidence) -> np.ndarray:
        return mean_over_routed(np.diagonal(evidence.statistics.norm_product), evidence)


class EanCa(FirstOrder):
    """Norm of the mean routed output, ||sum f / N_e|| (REAP's reference code). Needs output_sum."""

    needs: ClassVar[tuple[str, ...]] = ("output_sum",)
    name: Literal["ean_ca"] = "ean_ca"

    def scores(self, evidence: LayerEvidence) -> np.ndarray:
        return np.linalg.norm(_mean_output(evidence, self.name), axis=1)


class Mone(FirstOrder):
    """Norm of the per-channel standard deviation of f, times sum g / T (MoNE, arXiv:2507.00390). Needs output_sum.

    The norm is sqrt(sum n^2 / N_e - ||sum f / N_e||^2): variances of channels add. MoNE's replacement of a dropped
    expert by its mean output is no part of a stock checkpoint: this is its score only.
    """

    needs: ClassVar[tuple[str, ...]] = ("output_sum",)
    name: Literal["mone"] = "mone"

    def scores(self, evidence: LayerEvidence) -> np.ndarray:
        statistics = evidence.statistics
        mean = _mean_output(evidence, self.name)
        variance = mean_over_routed(statistics.norm_square_sum, evidence) - np.square(mean).sum(axis=1)
        return np.sqrt(np.maximum(variance, 0.0)) * statistics.gate_sum / float(statistics.tokens)


def _mean_output(evidence: LayerEvidence, criterion: str) -> np.ndarray:
    """sum f / N_e (experts, hidden), 0 where the expert was never routed."""
    output_sum = evidence.statistics.output_sum
    if output_sum is None:
        raise InputError(
            f"selection.criterion: {criterion} needs output_sum, which the statistics of {evidence.layer.name} do not "
            "hold; record again with calibration.statistics: all"
        )
    count = np.asarray(evidence.statistics.count, dtype=np.float64)[:, None]
    return np.divide(output_sum, count, out=np.zeros(output_sum.shape), where=count > 0)
