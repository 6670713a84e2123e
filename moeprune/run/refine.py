"""A portfolio: layer by layer the set of that criterion which costs the whole model least, measured on data kept apart.

A criterion sees one layer with all others intact; no criterion is best everywhere. `refine` starts from the best of
several plans and goes through the layers: each takes over another plan's set there when the model's KL on validation
trajectories falls by more than chance would do. Every choice is measured, so a few thousand tokens can be overfitted:
the margin asks for an improvement of so many standard errors, and validation trajectories are not the recorded ones.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.plan import LayerPlan, PrunePlan
from moeprune.selection.options import Goal

if TYPE_CHECKING:
    from moeprune.data.trajectories import TokenSet
    from moeprune.evaluation.intervals import Comparison, DomainSums

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Change:
    """One layer that took over another plan's set, and what that did to the goal on the validation tokens."""

    layer: str
    source: str  # the plan whose set it took
    before: float  # KL, nats a token
    after: float
    error: float  # standard error of the difference


@dataclass(frozen=True)
class Portfolio:
    """The refined plan, the plan it began with, which plan each layer's set comes from, and every change."""

    plan: PrunePlan
    start: str
    chosen: Mapping[str, str]
    changes: tuple[Change, ...]


def refine(
    model: Any,
    plans: Mapping[str, PrunePlan],
    tokens: "TokenSet",
    *,
    goal: Goal = "mean",
    margin: float = 1.0,
    rounds: int = 3,
    batch_tokens: int = 8192,
    on_progress: Progress | None = None,
) -> Portfolio:
    """The plan that takes every layer from one of `plans`, by coordinate descent on the KL to the unpruned model.

    At most 1 + rounds * layers passes of the model and of each distinct set. `on_progress(layers done, layers in all)`.
    Raises InputError when plans keep different numbers of experts in a layer, or were made for another model.
    """
    from moeprune.evaluation.fidelity import compare_students
    from moeprune.evaluation.students import pruned_students

    def compared(tried: Mapping[str, PrunePlan]) -> "dict[str, Comparison]":
        return compare_students(model, pruned_students(model, tried), tokens, batch_tokens=batch_tokens)

    _require_equal_counts(plans)
    measured = compared(plans)
    start = min(plans, key=lambda label: goal_of(measured[label], goal))  # the first of equals
    plan, current = plans[start], measured[start]
    changes: list[Change] = []
    chosen = dict.fromkeys(plan.kept, start)
    for turn in range(rounds):
        before = len(changes)
        for number, layer in enumerate(plan.layers):
            trials = _trials(plan, plans, layer)
            if trials:
                measured = compared(trials)
                best = min(trials, key=lambda label: goal_of(measured[label], goal))
                gain, error = improvement(current, measured[best], goal)
                if gain > margin * error:
                    ends = (goal_of(current, goal), goal_of(measured[best], goal))
                    changes.append(Change(layer.name, best, *ends, error))
                    plan, current, chosen[layer.name] = trials[best], measured[best], best
            if on_progress is not None:
                on_progress(turn * len(plan.layers) + number + 1, rounds * len(plan.layers))
        if len(changes) == before:
            break
    return Portfolio(plan, start, chosen, tuple(changes))


def _require_equal_counts(plans: Mapping[str, PrunePlan]) -> None:
    first, *others = plans.items()
    for label, plan in others:
        for one, other in zip(first[1].layers, plan.layers, strict=True):
            if len(one.kept) != len(other.kept):
                raise InputError(
                    f"refine: {first[0]} keeps {len(one.kept)} experts of {one.name} and {label} {len(other.kept)}, so "
                    "one set cannot stand for the other; set selection.budget.scope: layer"
                )


def _trials(plan: PrunePlan, plans: Mapping[str, PrunePlan], layer: LayerPlan) -> dict[str, PrunePlan]:
    """Label -> `plan` with that plan's set in this layer; each set that differs from the present one, once."""
    trials, seen = {}, {layer.kept}
    for label, other in plans.items():
        candidate = next(item for item in other.layers if item.name == layer.name)
        if candidate.kept not in seen:
            seen.add(candidate.kept)
            layers = tuple(candidate if item.name == layer.name else item for item in plan.layers)
            trials[label] = plan.model_copy(update={"layers": layers})
    return trials


def goal_of(comparison: "Comparison", goal: Goal) -> float:
    """Mean or largest KL over the domains, nats a token."""
    values = [float(sums.kl.sum() / sums.tokens.sum()) for sums in comparison.domains.values()]
    return max(values) if goal == "worst" else sum(values) / len(values)


def improvement(old: "Comparison", new: "Comparison", goal: Goal) -> tuple[float, float]:
    """By how much the goal falls from `old` to `new`, and the standard error of that over trajectories (paired).

    For the worst domain the error is that of the domain which is worst in `old`.
    """
    gain = goal_of(old, goal) - goal_of(new, goal)
    errors = {name: _paired_error(sums, new.domains[name]) for name, sums in old.domains.items()}
    if goal == "worst":
        worst = max(old.domains, key=lambda name: old.domains[name].kl.sum() / old.domains[name].tokens.sum())
        return gain, errors[worst]
    return gain, math.sqrt(sum(error**2 for error in errors.values())) / len(errors)


def _paired_error(old: "DomainSums", new: "DomainSums") -> float:
    """Standard error of a domain's difference in KL a token: a ratio of sums over trajectories, linearised.

    With one trajectory nothing is known about it; the difference itself stands for its error.
    """
    difference, tokens = old.kl - new.kl, old.tokens
    ratio = difference.sum() / tokens.sum()
    count = len(tokens)
    if count == 1:
        return abs(float(ratio))
    residuals = difference - ratio * tokens
    return float(math.sqrt(count / (count - 1) * (residuals**2).sum()) / tokens.sum())
