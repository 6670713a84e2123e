"""What a selection must respect beside the count: experts that stay and routing mass that stays, worked out once."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.statistics import Layer
from moeprune.selection.criteria.criterion import LayerEvidence
from moeprune.selection.options import Budget

SUPER_QUANTILE = 0.995  # of the output maxima of all experts of all layers
SUPER_SHARE = 0.1  # of the largest output maximum
SUPER_DEPTH = 0.75  # later layers hold none

ExpertSets = Mapping[str, tuple[int, ...]]  # layer name -> ascending expert ids; layers without any may be left out


@dataclass(frozen=True)
class Protection:
    """What every layer must respect."""

    must_keep: ExpertSets  # those that the budget names, and the super-experts
    super_experts: ExpertSets  # none unless the budget protects them
    shares: Mapping[str, float]  # domain -> share of its routed tokens that kept experts must hold


def protection(evidence: Sequence[LayerEvidence], budget: Budget) -> Protection:
    """Raises InputError for an unknown layer, expert or domain."""
    must_keep = named_experts([item.layer for item in evidence], budget)
    extreme = super_experts(evidence) if budget.protect_super_experts else {}
    for name, experts in extreme.items():
        must_keep[name] = tuple(sorted({*must_keep.get(name, ()), *experts}))
    return Protection(must_keep, extreme, _shares(evidence[0], budget))


def named_experts(layers: Sequence[Layer], budget: Budget) -> dict[str, tuple[int, ...]]:
    """The experts of `must_keep` by layer, ascending. Raises InputError for an unknown layer or expert."""
    by_name = {layer.name: layer for layer in layers}
    for name, experts in budget.must_keep.items():
        if name not in by_name:
            near = difflib.get_close_matches(name, by_name, n=1) or [layers[0].name]
            raise InputError(f"selection.budget.must_keep: no MoE layer {name!r}; did you mean {near[0]!r}?")
        limit = by_name[name].num_experts
        for expert in experts:
            if not 0 <= expert < limit:
                raise InputError(f"selection.budget.must_keep.{name}: expert {expert} is not in 0..{limit - 1}")
    return {name: tuple(sorted(set(experts))) for name, experts in budget.must_keep.items()}


def super_experts(evidence: Sequence[LayerEvidence]) -> dict[str, tuple[int, ...]]:
    """Layer name -> experts with extreme outputs (the rule of REAP's code); layers without any are left out.

    The signed maximum of an expert's output is above the 99.5 % quantile over all experts and layers and above a
    tenth of the largest one, in the first three quarters of the layers.
    """
    maxima = [np.asarray(item.statistics.output_max, dtype=np.float64) for item in evidence]
    seen = np.concatenate([values[np.isfinite(values)] for values in maxima])
    if not len(seen):
        return {}
    limit = max(float(np.quantile(seen, SUPER_QUANTILE)), SUPER_SHARE * float(seen.max()))
    depth = int(np.ceil(SUPER_DEPTH * len(evidence)))
    above = {
        item.layer.name: tuple(np.flatnonzero(values > limit).tolist())
        for item, values in zip(evidence[:depth], maxima[:depth])
    }
    return {name: experts for name, experts in above.items() if experts}


def _shares(evidence: LayerEvidence, budget: Budget) -> dict[str, float]:
    """Domain -> share of its routed tokens that must stay. Raises InputError for a domain that is not mixed in."""
    shares = budget.keep_at_least
    if shares is None:
        return {}
    if not isinstance(shares, dict):
        return dict.fromkeys(evidence.domains, shares)
    for domain in shares:
        if domain not in evidence.domains:
            raise InputError(
                f"selection.budget.keep_at_least: {domain!r} is not a mixed domain ({', '.join(evidence.domains)})"
            )
    return shares
