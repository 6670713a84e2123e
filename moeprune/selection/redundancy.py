"""How much each layer can give: cost curves over the number of pruned experts, before a ratio is chosen."""

from typing import Any

import numpy as np

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.statistics import RoutingStatistics
from moeprune.selection.allocation import cost_curve
from moeprune.selection.budget import kept_range
from moeprune.selection.criteria.criterion import gather
from moeprune.selection.criteria.outside import PruneSetFile
from moeprune.selection.layer import layer_tasks
from moeprune.selection.options import SelectionOptions
from moeprune.selection.protection import protection


def redundancy(statistics: RoutingStatistics, options: SelectionOptions) -> dict[str, Any]:
    """Plain data: per layer the cost of pruning 0, 1, 2, ... experts as a share of pruning all, and the knee.

    {"criterion": name, "layers": [{"name", "num_experts", "dead", "pruned": [counts], "cost": [shares],
    "knee": {"pruned", "fraction", "cost"}}]}. The knee is the count whose cost lies farthest below the straight line
    from the first to the last count: from there on each further expert costs more than the average one. The budget's
    constraints hold, its `prune` does not matter.
    """
    if isinstance(options.criterion, PruneSetFile):
        raise InputError("selection.criterion: a prune set from a file has no cost curve; choose another criterion")
    evidence = gather(statistics, options.mix)
    tasks = layer_tasks(evidence, options.criterion, protection(evidence, options.budget))
    layers = []
    for item, task in zip(evidence, tasks):
        kept = kept_range(item.layer, options.budget, task.must_keep)
        curve = cost_curve(task, [item.layer.num_experts - count for count in kept])
        whole = task.objective.cost(np.ones(item.layer.num_experts, dtype=bool))
        points = [(count, cost / whole if whole else 0.0) for count, cost in sorted(curve.items()) if np.isfinite(cost)]
        layers.append(
            {
                "name": item.layer.name,
                "num_experts": item.layer.num_experts,
                "dead": int(item.dead.sum()),
                "pruned": [count for count, _ in points],
                "cost": [cost for _, cost in points],
                "knee": _knee(points, item.layer.num_experts),
            }
        )
    return {"criterion": options.criterion.name, "layers": layers}


def _knee(points: list[tuple[int, float]], experts: int) -> dict[str, float]:
    counts, costs = (np.array(values, dtype=float) for values in zip(*points))
    span = counts[-1] - counts[0]
    line = costs[0] + (costs[-1] - costs[0]) * (counts - counts[0]) / span if span else costs
    index = int(np.argmax(line - costs))
    return {"pruned": int(counts[index]), "fraction": float(counts[index] / experts), "cost": float(costs[index])}
