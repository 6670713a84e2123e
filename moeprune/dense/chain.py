"""One weight through its chain of methods, with everything counted after each.

Which methods meet at a weight, in which order, and which orders are refused.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from moeprune.artifacts.errors import InputError
from moeprune.dense.methods.inputs import InputStatistics
from moeprune.dense.methods.kinds import ROLES, Pattern
from moeprune.dense.methods.method import DenseMethod
from moeprune.dense.methods.result import DenseResult, Quantised, follows, holds_mask, sparsity_of
from moeprune.dense.report import Step
from moeprune.dense.weights import Weight

if TYPE_CHECKING:
    from moeprune.dense.weights import Seen, Weight

Chain = tuple[DenseMethod, ...]


def chains(seen: "Seen", methods: Sequence[DenseMethod]) -> "dict[str, Chain]":
    """Weight name -> the methods that it goes through, in order; weights that no target names are absent.

    Raises InputError for a target that names nothing, an order that undoes earlier work, and a weight whose width a
    pattern or group size does not divide.
    """
    for place, method in enumerate(methods):
        _require_matches(seen, method, f"dense[{place}] {name_of(method)}")
    chain_of: dict[str, Chain] = {}
    for weight in seen.weights:
        chain = tuple(method for method in methods if any(matches(target, weight) for target in method.targets))
        if chain:
            require_order(chain, weight.name)
            for method in chain:
                method.check_shape(weight.name, weight.shape[1])
            chain_of[weight.name] = chain
    return chain_of


def matches(target: str, weight: "Weight") -> bool:
    if target.startswith("re:"):
        return re.search(target[3:], weight.name) is not None
    return weight.role == target


def require_order(chain: Chain, name: str) -> None:
    """Prune, then quantise: what is quantised is not pruned or rounded again, unless the later method is forced."""
    for earlier, later in pairwise(chain):
        if earlier.kind != "prune" and not later.force:
            raise InputError(
                f"{name}: dense runs {name_of(later)} after {name_of(earlier)}, which undoes the quantisation; prune "
                f"first (or use joint), quantise once, or set force: true on {name_of(later)}"
            )


def name_of(method: DenseMethod) -> str:
    return str(method.name)  # type: ignore[attr-defined]


def _require_matches(seen: "Seen", method: DenseMethod, place: str) -> None:
    by_default = "targets" not in method.model_fields_set
    matched = {target: any(matches(target, weight) for weight in seen.weights) for target in method.targets}
    if by_default and any(matched.values()):
        return
    for target, any_weight in matched.items():
        if not any_weight:
            raise InputError(f"{place}: target '{target}' matches nothing{_hint(seen, target)}")


def _hint(seen: "Seen", target: str) -> str:
    if target.startswith("re:"):
        left = [item for item in seen.left if re.search(target[3:], item.name)]
        if left:
            return f"; {left[0].name} is never compressed: {left[0].reason}"
        return f"; names look like {seen.weights[0].name}" if seen.weights else ""
    present = [role for role in ROLES if any(weight.role == role for weight in seen.weights)]
    return f"; this model has {', '.join(present) or 'no known role'}"


SPARSE_SOURCE = 0.05  # share of exact zeros from which a weight counts as pruned before it came to us


@dataclass(frozen=True)
class Done:
    """A weight after its chain."""

    weight: torch.Tensor  # (out, in), in the stored dtype
    quantised: Quantised | None
    steps: list[Step]
    warnings: list[str]


def apply(
    weight: Weight, chain: Sequence[DenseMethod], statistics: InputStatistics, *, dtype: torch.dtype | None = None
) -> Done:
    """The weight after every method of the chain, what was pruned held from one to the next.

    dtype: of the stored result (default the weight's own); scales are exact in it, and counts are taken in it. A weight
    that comes sparse (at least 5 % exact zeros) keeps its zeros.
    """
    original = weight.read()
    dtype = dtype or weight.dtype
    warnings: list[str] = []
    held = _zeros_of_source(original, chain, weight.name, warnings)
    current, quantised = original, None
    steps: list[Step] = []
    if statistics.hessian is not None and statistics.tokens < statistics.in_features:
        warnings.append(
            f"{weight.name}: {statistics.tokens} calibration tokens for {statistics.in_features} inputs, so the "
            "Hessian has no full rank and damping decides what the data do not"
        )
    energy = statistics.output_energy(original) if statistics.hessian is not None else 0.0
    for method in chain:
        result = method.compress(current, statistics, held=held, scale_dtype=dtype)
        warnings += result.warnings
        held = result.mask if result.mask is not None else held
        quantised = _quantised_after(method, quantised, result, weight.name, warnings)
        stored = result.weight.to(dtype)
        error = statistics.output_energy(stored.float() - original) / energy if energy > 0 else None
        steps.append(_step(weight, method, statistics, result, stored, held, quantised, error))
        current = result.weight
    return Done(current.to(dtype), quantised, steps, warnings)


def _step(
    weight: Weight,
    method: DenseMethod,
    statistics: InputStatistics,
    result: DenseResult,
    stored: torch.Tensor,
    held: torch.Tensor | None,
    quantised: Quantised | None,
    error: float | None,
) -> Step:
    """Counted on the stored weight, and asserted: a pruned place that is not zero any more is our bug."""
    assert held is None or holds_mask(stored, held), f"{weight.name}: {name_of(method)} filled pruned places"
    pattern = getattr(method, "pattern", None)
    assert pattern is None or follows(stored, Pattern.parse(pattern)), f"{weight.name}: {pattern} does not hold"
    assert bool(torch.isfinite(stored).all()), f"{weight.name}: not finite after {name_of(method)}"
    return Step(
        weight=weight.name,
        role=weight.role,
        method=name_of(method),
        shape=weight.shape,
        tokens=statistics.tokens,
        sparsity=sparsity_of(stored),
        pattern=pattern,
        bits=None if quantised is None else quantised.bits_per_weight(weight.shape, stored.dtype),
        error=error,
        fallback=result.fallback,
        damping_steps=result.damping_steps,
        dead_columns=result.dead_columns,
    )


def _zeros_of_source(
    original: torch.Tensor, chain: Sequence[DenseMethod], name: str, warnings: list[str]
) -> torch.Tensor | None:
    share = sparsity_of(original)
    if share < SPARSE_SOURCE:
        return None
    if chain[0].kind == "quantise":
        warnings.append(f"{name}: came with {share:.1%} exact zeros; they are held")
    return original != 0


def _quantised_after(
    method: DenseMethod, quantised: Quantised | None, result: DenseResult, name: str, warnings: list[str]
) -> Quantised | None:
    """A new quantisation replaces the old one; zeroing alone keeps it, an update leaves it."""
    if result.quantised is not None:
        return result.quantised
    if quantised is not None and (method.needs == "hessian" and result.fallback is None):
        warnings.append(f"{name}: {name_of(method)} changed quantised weights, which are stored unquantised")
        return None
    return quantised
