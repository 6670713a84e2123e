"""Criteria: what it costs to prune experts. Each class is its own config section (`selection.criterion`).

A criterion turns the evidence of one layer into an objective. First-order criteria score single experts (lowest scores
go first); HOPE scores pairs. Sums and symbols as in artifacts.statistics: g is the gate, n = ||f|| the norm of an
expert's output, N_e the number of tokens routed to expert e. An expert that was never routed scores 0.
"""

import difflib
import importlib
import zlib
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from moeprune.artifacts.errors import InputError
from moeprune.selection.evidence import LayerEvidence
from moeprune.selection.interaction import Normalise, Product, interaction
from moeprune.selection.objective import Modular, Objective, Quadratic
from moeprune.selection.prune_set import PruneSetFile


class Criterion(BaseModel):
    """A criterion's options; `objective` does the work."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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


def _mean(sums: np.ndarray, evidence: LayerEvidence) -> np.ndarray:
    """sums / N_e (experts,), 0 where the expert was never routed."""
    count = np.asarray(evidence.statistics.count, dtype=np.float64)
    return np.divide(sums, count, out=np.zeros(len(count)), where=count > 0)


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
        return _mean(evidence.statistics.norm_sum, evidence)


class Msan(FirstOrder):
    """sum n^2 / N_e (arXiv:2606.15716)."""

    name: Literal["msan"] = "msan"

    def scores(self, evidence: LayerEvidence) -> np.ndarray:
        return _mean(evidence.statistics.norm_square_sum, evidence)


class WeightedEan(FirstOrder):
    """sum g n (arXiv:2510.13999)."""

    name: Literal["weighted_ean"] = "weighted_ean"

    def scores(self, evidence: LayerEvidence) -> np.ndarray:
        return evidence.statistics.gated_norm_sum


class Reap(FirstOrder):
    """sum g n / N_e (REAP, arXiv:2510.13999)."""

    name: Literal["reap"] = "reap"

    def scores(self, evidence: LayerEvidence) -> np.ndarray:
        return _mean(evidence.statistics.gated_norm_sum, evidence)


class ReapL2(FirstOrder):
    """sum g^2 n^2 / N_e, the diagonal of HOPE's F (arXiv:2609.18916, section 3.5)."""

    name: Literal["reap_l2"] = "reap_l2"

    def scores(self, evidence: LayerEvidence) -> np.ndarray:
        return _mean(np.diagonal(evidence.statistics.norm_product), evidence)


class EanCa(FirstOrder):
    """Norm of the mean routed output, ||sum f / N_e|| (REAP's reference code). Needs output_sum."""

    name: Literal["ean_ca"] = "ean_ca"

    def scores(self, evidence: LayerEvidence) -> np.ndarray:
        return np.linalg.norm(_mean_output(evidence, self.name), axis=1)


class Mone(FirstOrder):
    """Norm of the per-channel standard deviation of f, times sum g / T (MoNE, arXiv:2507.00390). Needs output_sum.

    The norm is sqrt(sum n^2 / N_e - ||sum f / N_e||^2): variances of channels add. MoNE's replacement of a dropped
    expert by its mean output is no part of a stock checkpoint: this is its score only.
    """

    name: Literal["mone"] = "mone"

    def scores(self, evidence: LayerEvidence) -> np.ndarray:
        statistics = evidence.statistics
        mean = _mean_output(evidence, self.name)
        variance = _mean(statistics.norm_square_sum, evidence) - np.square(mean).sum(axis=1)
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


class Custom(BaseModel):
    """A criterion of your own: `name` is `package.module:Class`, every other key goes to the class as a keyword.

    The object needs `objective(evidence: LayerEvidence) -> Objective`.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")

    def objective(self, evidence: LayerEvidence) -> Objective:
        return self._build().objective(evidence)

    def layer_scale(self, evidence: LayerEvidence) -> float:
        criterion = self._build()
        if hasattr(criterion, "layer_scale"):
            return float(criterion.layer_scale(evidence))
        return criterion.objective(evidence).cost(np.ones(evidence.layer.num_experts, dtype=bool))

    def warnings(self, evidence: LayerEvidence) -> list[str]:
        criterion = self._build()
        return list(criterion.warnings(evidence)) if hasattr(criterion, "warnings") else []

    def _build(self) -> Any:
        module_name, _, class_name = self.name.partition(":")
        place = f"selection.criterion: {self.name!r}"
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise InputError(f"{place}: cannot import {module_name} ({error}); is it on the Python path?") from error
        if not hasattr(module, class_name):
            raise InputError(f"{place}: {module_name} has no {class_name}")
        try:
            criterion = getattr(module, class_name)(**(self.model_extra or {}))
        except (TypeError, ValueError) as error:
            raise InputError(f"{place}: {class_name} refuses its options ({error})") from error
        if not hasattr(criterion, "objective"):
            raise InputError(f"{place}: {class_name} has no method objective(evidence)")
        return criterion


ScoringCriterion = Criterion | Custom  # everything but a prune set from a file

CRITERIA: tuple[type[BaseModel], ...] = (
    Random,
    Frequency,
    GateSum,
    Ean,
    Man,
    Msan,
    WeightedEan,
    Reap,
    ReapL2,
    EanCa,
    Mone,
    Hope,
    PruneSetFile,
)
CRITERION_NAMES: tuple[str, ...] = tuple(str(criterion.model_fields["name"].default) for criterion in CRITERIA)
_CUSTOM = "package.module:Class"


def _named(value: Any) -> Any:
    """A bare name stands for the criterion with default options; an unknown name is refused with the nearest."""
    if isinstance(value, str):
        value = {"name": value}
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    if not isinstance(name, str):
        raise ValueError(f"a criterion needs a name, one of {', '.join(CRITERION_NAMES)} or {_CUSTOM}")
    if name not in CRITERION_NAMES and ":" not in name:
        near = difflib.get_close_matches(name, CRITERION_NAMES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown criterion {name!r}{hint} known: {', '.join(CRITERION_NAMES)} and {_CUSTOM}")
    return value


def _tag(value: Any) -> str:
    name = str(value.get("name") if isinstance(value, dict) else value.name)
    return _CUSTOM if ":" in name else name


AnyCriterion = Annotated[
    Annotated[Random, Tag("random")]
    | Annotated[Frequency, Tag("frequency")]
    | Annotated[GateSum, Tag("gate_sum")]
    | Annotated[Ean, Tag("ean")]
    | Annotated[Man, Tag("man")]
    | Annotated[Msan, Tag("msan")]
    | Annotated[WeightedEan, Tag("weighted_ean")]
    | Annotated[Reap, Tag("reap")]
    | Annotated[ReapL2, Tag("reap_l2")]
    | Annotated[EanCa, Tag("ean_ca")]
    | Annotated[Mone, Tag("mone")]
    | Annotated[Hope, Tag("hope")]
    | Annotated[PruneSetFile, Tag("file")]
    | Annotated[Custom, Tag(_CUSTOM)],
    Discriminator(_tag),
    BeforeValidator(_named),
]
