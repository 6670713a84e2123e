"""Which methods meet at a weight, in which order, and which orders are refused."""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from moeprune.artifacts.errors import InputError
from moeprune.dense.method import ROLES, DenseMethod

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
    found: dict[str, Chain] = {}
    for weight in seen.weights:
        chain = tuple(method for method in methods if any(matches(target, weight) for target in method.targets))
        if chain:
            require_order(chain, weight.name)
            for method in chain:
                method.check_shape(weight.name, weight.shape[1])
            found[weight.name] = chain
    return found


def matches(target: str, weight: "Weight") -> bool:
    if target.startswith("re:"):
        return re.search(target[3:], weight.name) is not None
    return weight.role == target


def require_order(chain: Chain, name: str) -> None:
    """Prune, then quantise: what is on a grid is not pruned or rounded again, unless the later method is forced."""
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
