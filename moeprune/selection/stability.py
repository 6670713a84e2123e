"""How much of a set is sampling noise: the same selection on each half of the calibration trajectories."""

import numpy as np

from moeprune.selection.layer import LayerTask, solve_layer
from moeprune.selection.solvers.enumeration import is_slow
from moeprune.selection.solvers.table import Swap

UNSTABLE = 0.6  # a Jaccard index below this is worth a warning


def stability(even: LayerTask, odd: LayerTask, prune: int) -> dict[str, float]:
    """What the halves' sets share, and what each costs on the other half.

    `jaccard`: pruned by both / pruned by either. `regret_even`: (cost of the even half's set on the odd half - cost of
    the odd half's own set) / the latter; `regret_odd` the other way round. Sets come from a swap search with two
    starts, or one where costs are slow: the noise of sampling is far larger than what more starts change.
    """
    solver = Swap(starts=1 if is_slow(even.objective) else 2)
    sets = [solve_layer(task, prune, solver).pruned for task in (even, odd)]
    either = int((sets[0] | sets[1]).sum())
    return {
        "jaccard": int((sets[0] & sets[1]).sum()) / either if either else 1.0,
        "regret_even": _regret(odd, sets[0], sets[1]),
        "regret_odd": _regret(even, sets[1], sets[0]),
    }


def _regret(task: LayerTask, other: np.ndarray, own: np.ndarray) -> float:
    """Relative to the own set's cost, or to the cost of pruning everything where that is 0."""
    best = task.objective.cost(own)
    extra = task.objective.cost(other) - best
    unit = abs(best) or abs(task.objective.cost(np.ones_like(own)))
    return extra / unit if unit else 0.0
