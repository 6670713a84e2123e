"""How many experts go in each layer, checked before anything is solved."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.statistics import Layer
from moeprune.selection.options import Budget
from moeprune.selection.protection import ExpertSets, named_experts


@dataclass(frozen=True)
class LayerBudget:
    """How many experts one layer gives."""

    layer: Layer
    requested: int  # experts the budget asks for: a count as it is, a fraction rounded down
    pruned: int  # experts that go: less where kept counts must be multiples

    @property
    def kept(self) -> int:
        return self.layer.num_experts - self.pruned

    def __str__(self) -> str:
        line = f"{self.layer.name}: removes {self.pruned} of {self.layer.num_experts}"
        return line if self.pruned == self.requested else f"{line} (asked for {self.requested})"


def check_budget(layers: Sequence[Layer], budget: Budget) -> None:
    """Raises InputError when no selection could meet the budget, as far as that is known without statistics."""
    known_budgets(layers, budget, named_experts(layers, budget))


def known_budgets(layers: Sequence[Layer], budget: Budget, must_keep: ExpertSets) -> list[LayerBudget]:
    """One budget per layer; none for scope: global, where costs decide. Raises InputError as `check_budget`."""
    if budget.scope == "global":
        global_counts(layers, budget, must_keep)
        return []
    return layer_budgets(layers, budget, must_keep)


def layer_budgets(layers: Sequence[Layer], budget: Budget, must_keep: ExpertSets) -> list[LayerBudget]:
    """One budget per layer for scope: layer.

    Raises InputError where a layer cannot give that many, or when no layer gives any.
    """
    budgets = [_layer_budget(layer, budget, must_keep.get(layer.name, ())) for layer in layers]
    if not any(item.pruned for item in budgets):
        first = budgets[0]
        multiple, least = step(first.layer, budget), _least(first.layer, budget)
        possible = least < (first.layer.num_experts if isinstance(budget.prune, int) else 1)
        way_out = f"raise it to {least} or more" if possible else "no expert can go; lower selection.budget.multiple_of"
        raise InputError(
            f"selection.budget.prune: {budget.prune} removes nothing ({first}; kept counts are multiples of "
            f"{multiple}); {way_out}"
        )
    return budgets


def budget_warnings(budgets: list[LayerBudget]) -> list[str]:
    """Sentences about layers that give less than asked for, or nothing."""
    short = [item for item in budgets if item.pruned != item.requested]
    warnings = [f"{item.layer.name}: nothing is removed in this layer" for item in budgets if not item.pruned]
    if short:
        warnings.append(
            f"the budget is not met exactly in {len(short)} of {len(budgets)} layers, because kept counts must be "
            f"multiples: {'; '.join(map(str, short[:4]))}{' ...' if len(short) > 4 else ''}"
        )
    return warnings


def step(layer: Layer, budget: Budget) -> int:
    """Kept counts are multiples of this: equal numbers per router group, and the user's `multiple_of`."""
    return math.lcm(budget.multiple_of, layer.num_groups)


def router_floor(layer: Layer) -> int:
    """The fewest experts with which the layer's router still works."""
    per_group = max(layer.group_minimum, math.ceil(layer.top_k / layer.topk_group)) if layer.num_groups > 1 else 1
    return max(layer.top_k, per_group * layer.num_groups)


def group_of(layer: Layer) -> np.ndarray:
    """Router group (experts,) of every expert."""
    return np.arange(layer.num_experts) * layer.num_groups // layer.num_experts


def requested_count(prune: int | float, experts: int) -> int:
    """Experts to prune of so many. A fraction is read as the decimal number it was written as, then rounded down."""
    return prune if isinstance(prune, int) else math.floor(Fraction(repr(prune)) * experts)


def kept_range(layer: Layer, budget: Budget, must_keep: tuple[int, ...] = ()) -> range:
    """The kept counts this layer may have, ascending: multiples between floor and ceiling. May be empty."""
    multiple = step(layer, budget)
    lowest = max(router_floor(layer), _kept(budget.floor, layer, math.ceil), _held(layer, must_keep))
    highest = layer.num_experts if budget.ceiling is None else _kept(budget.ceiling, layer, math.floor)
    return range(_rounded_up(lowest, multiple), min(highest, layer.num_experts) + 1, multiple)


def global_counts(layers: Sequence[Layer], budget: Budget, must_keep: ExpertSets) -> tuple[list[list[int]], int]:
    """The numbers of experts every layer may give, ascending, and the number asked for in all.

    Asked for are a fraction of all experts, or a count times the number of layers. Raises InputError when floors and
    ceilings leave a layer no number, or make the sum unattainable.
    """
    total = sum(layer.num_experts for layer in layers)
    wanted = budget.prune * len(layers) if isinstance(budget.prune, int) else requested_count(budget.prune, total)
    counts = []
    for layer in layers:
        kept = kept_range(layer, budget, must_keep.get(layer.name, ()))
        if not kept:
            raise InputError(
                f"{layer.name}: no kept count is a multiple of {step(layer, budget)} between selection.budget.floor "
                "(or what the router and must_keep need) and selection.budget.ceiling"
            )
        counts.append([layer.num_experts - count for count in reversed(kept)])
    least, most = (sum(pick(options) for options in counts) for pick in (min, max))
    if not max(least, 1) <= wanted <= most:
        raise InputError(
            f"selection.budget.prune: {budget.prune} asks for {wanted} of {total} experts, but floor, ceiling, "
            f"multiple_of, must_keep and the routers allow {least} to {most}; change prune or one of them"
        )
    return counts, wanted


def _kept(limit: int | float | None, layer: Layer, whole: Callable[[Fraction], int]) -> int:
    if limit is None:
        return 0
    return limit if isinstance(limit, int) else whole(Fraction(repr(limit)) * layer.num_experts)


def _held(layer: Layer, must_keep: tuple[int, ...]) -> int:
    """The kept count that must_keep implies: the fullest group decides for all of them."""
    group = group_of(layer)
    return layer.num_groups * int(np.bincount(group[list(must_keep)], minlength=layer.num_groups).max())


def _layer_budget(layer: Layer, budget: Budget, must_keep: tuple[int, ...]) -> LayerBudget:
    requested = requested_count(budget.prune, layer.num_experts)
    kept = min(_rounded_up(layer.num_experts - requested, step(layer, budget)), layer.num_experts)
    _check_router(layer, budget, kept)
    _check_must_keep(layer, kept, must_keep)
    for name, limit, broken in (("floor", budget.floor, kept.__lt__), ("ceiling", budget.ceiling, kept.__gt__)):
        bound = _kept(limit, layer, math.ceil if name == "floor" else math.floor)
        if limit is not None and broken(bound):
            raise InputError(
                f"{layer.name}: selection.budget.prune keeps {kept} of {layer.num_experts} experts but "
                f"selection.budget.{name} is {limit}; change one of them"
            )
    return LayerBudget(layer, requested, layer.num_experts - kept)


def _check_router(layer: Layer, budget: Budget, kept: int) -> None:
    lowest = router_floor(layer)
    if kept >= lowest:
        return
    most = layer.num_experts - _rounded_up(lowest, step(layer, budget))
    if most <= 0:
        remedy = "no expert of this layer can go"
    elif isinstance(budget.prune, int):
        remedy = f"lower selection.budget.prune to {most} or less"
    else:
        remedy = f"lower selection.budget.prune to {_rounded_down(most, layer.num_experts)} or less"
    why = f"the router picks top_k={layer.top_k}"
    if kept >= layer.top_k:
        why = (
            f"the router has {layer.num_groups} groups, draws top_k={layer.top_k} from {layer.topk_group} of them and "
            f"needs {layer.group_minimum} in each, so at least {lowest} must stay"
        )
    raise InputError(f"{layer.name}: keeps {max(kept, 0)} experts but {why}; {remedy}")


def _check_must_keep(layer: Layer, kept: int, must_keep: tuple[int, ...]) -> None:
    group, quota = group_of(layer), kept // layer.num_groups
    for index in range(layer.num_groups):
        held = [expert for expert in must_keep if group[expert] == index]
        if len(held) > quota:
            where = f" of router group {index}" if layer.num_groups > 1 else ""
            raise InputError(
                f"{layer.name}: must_keep and protect_super_experts hold {len(held)} experts{where} but "
                f"selection.budget.prune leaves {quota}; keep fewer of them or prune less"
            )


def _least(layer: Layer, budget: Budget) -> float | int:
    """The smallest `prune`, of the kind the user typed, that removes something from this layer."""
    multiple = step(layer, budget)
    count = layer.num_experts - (layer.num_experts - 1) // multiple * multiple
    return count if isinstance(budget.prune, int) else math.ceil(1e4 * count / layer.num_experts) / 1e4


def _rounded_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _rounded_down(count: int, of: int) -> float:
    """count / of, cut to four decimals so that it still floors to `count`."""
    exact = count / of
    return exact if Fraction(repr(exact)) * of >= count else math.ceil(1e4 * exact) / 1e4
