"""What a criterion is: options that turn the evidence of one layer into an objective.

The evidence is the layer's facts and its statistics, mixed over domains and domain by domain.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.statistics import Layer, LayerStatistics, Part, RoutingStatistics
from moeprune.selection.objective import Modular, Objective


@dataclass(frozen=True)
class LayerEvidence:
    """One layer's statistics under one domain mix."""

    layer: Layer
    statistics: LayerStatistics  # the weighted sum over domains
    domains: Mapping[str, LayerStatistics] = field(default_factory=dict)  # unweighted, those with a weight above 0

    @property
    def dead(self) -> np.ndarray:
        """True (experts,) where no counted token was routed to the expert."""
        return np.asarray(self.statistics.count) <= 0


def gather(statistics: RoutingStatistics, mix: Mapping[str, float], *, part: Part = "all") -> list[LayerEvidence]:
    """Evidence of every layer, in model order. Raises InputError when a layer saw no token of the mix."""
    mixed = statistics.mix(mix, part=part)
    used = _used(statistics, mix)
    alone = {domain: statistics.mix(_only(statistics, domain), part=part) for domain in used}
    evidence = []
    for layer in statistics.layers:
        domains = {domain: alone[domain][layer.name] for domain in used}
        evidence.append(LayerEvidence(layer, mixed[layer.name], domains))
        if part == "all" and not float(mixed[layer.name].tokens) > 0:
            raise InputError(f"{layer.name}: no counted token in the statistics of {', '.join(used)}; record more data")
    return evidence


def mix_shares(statistics: RoutingStatistics, mix: Mapping[str, float]) -> dict[str, float]:
    """Domain -> its effective share of the mixed tokens (tokens x weight), summing to 1."""
    name = statistics.layers[0].name
    weighted = {
        domain: mix.get(domain, 1.0) * float(layers[name].tokens) for domain, layers in statistics.domains.items()
    }
    total = sum(weighted.values())
    return {domain: value / total if total else 0.0 for domain, value in weighted.items()}


def absent(statistics: RoutingStatistics, mix: Mapping[str, float], part: Part) -> list[str]:
    """Mixed domains without a counted token in this part of the trajectories."""
    return [domain for domain in _used(statistics, mix) if not _tokens(statistics, domain, part) > 0]


def balanced(statistics: RoutingStatistics, mix: Mapping[str, float], part: Part) -> dict[str, float]:
    """The mix under which every domain weighs in this part what it weighs in the whole. No domain may be absent."""
    weights = dict.fromkeys(statistics.domains, 0.0)
    for domain in _used(statistics, mix):
        ratio = _tokens(statistics, domain, "all") / _tokens(statistics, domain, part)
        weights[domain] = mix.get(domain, 1.0) * ratio
    return weights


def _used(statistics: RoutingStatistics, mix: Mapping[str, float]) -> list[str]:
    return [domain for domain in statistics.domains if mix.get(domain, 1.0) > 0]


def _tokens(statistics: RoutingStatistics, domain: str, part: Part) -> float:
    return float(statistics.mix(_only(statistics, domain), part=part)[statistics.layers[0].name].tokens)


def _only(statistics: RoutingStatistics, domain: str) -> dict[str, float]:
    return {other: float(other == domain) for other in statistics.domains}


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
