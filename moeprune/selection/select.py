"""Statistics in, prune plan out. Needs no model."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from moeprune.artifacts.plan import LayerPlan, PrunePlan
from moeprune.artifacts.statistics import Layer, Part, RoutingStatistics
from moeprune.selection.allocation import allocate
from moeprune.selection.budget import budget_warnings, layer_budgets
from moeprune.selection.criteria.criterion import LayerEvidence, absent, balanced, gather
from moeprune.selection.criteria.outside import PruneSetFile
from moeprune.selection.criteria.worst_domain import WorstDomain
from moeprune.selection.given_plan import plan_from_file
from moeprune.selection.layer import LayerTask, layer_tasks, solve_layer
from moeprune.selection.objective import Solution
from moeprune.selection.options import SelectionOptions
from moeprune.selection.protection import Protection, protection
from moeprune.selection.solvers.certificate import gap_of
from moeprune.selection.stability import UNSTABLE, stability

Progress = Callable[[int, int], None]
PARTS: tuple[Part, Part] = ("even", "odd")
Halves = tuple[list[LayerTask], list[LayerTask]]


def select(
    statistics: RoutingStatistics, options: SelectionOptions, *, on_progress: Progress | None = None
) -> PrunePlan:
    """Which experts of every layer are kept. Deterministic, and independent of the unit of the statistics.

    Experts that were never routed go first and are named in the plan's warnings. `on_progress(done, layers)` is called
    after every layer. Raises InputError when the budget cannot be met or nothing would be removed.
    """
    if isinstance(options.criterion, PruneSetFile):
        layers, warnings = plan_from_file(options.criterion, statistics.layers, options)
    else:
        layers, warnings = _solved(statistics, options, on_progress)
    return PrunePlan(
        model_type=str(statistics.manifest["model"].get("model_type", "")),
        model_fingerprint=statistics.fingerprint,
        statistics_key=statistics.key,
        criterion=options.criterion.model_dump(mode="json"),
        solver=options.solver.model_dump(mode="json"),
        budget=options.budget.model_dump(mode="json"),
        mix={domain: options.mix.get(domain, 1.0) for domain in statistics.domains},
        layers=tuple(layers),
        warnings=tuple(warnings),
    )


def _solved(
    statistics: RoutingStatistics, options: SelectionOptions, on_progress: Progress | None
) -> tuple[list[LayerPlan], list[str]]:
    """Evidence -> tasks -> counts -> one solution a layer, and how far the halves of the data agree on it."""
    assert not isinstance(options.criterion, PruneSetFile)
    evidence = gather(statistics, options.mix)
    protected = protection(evidence, options.budget)
    tasks = layer_tasks(evidence, options.criterion, protected)
    counts, warnings = _counts(evidence, tasks, options)
    warnings += _mix_warnings(options) + _super_warnings(protected, options)
    halves, sentences = _halves(statistics, options, protected)
    warnings += sentences
    layers = []
    for index, (item, task, count) in enumerate(zip(evidence, tasks, counts)):
        solution = solve_layer(task, count, options.solver)
        warnings += options.criterion.warnings(item) + _layer_warnings(item, solution)
        stable = stability(halves[0][index], halves[1][index], count) if halves else None
        layers.append(_layer_plan(item.layer, solution, stable))
        if on_progress is not None:
            on_progress(index + 1, len(evidence))
    return layers, warnings + _unstable(layers)


def _counts(
    evidence: list[LayerEvidence], tasks: list[LayerTask], options: SelectionOptions
) -> tuple[list[int], list[str]]:
    """How many experts each layer prunes, and warnings."""
    assert not isinstance(options.criterion, PruneSetFile)
    if options.budget.scope == "global":
        scales = [options.criterion.layer_scale(item) or 1.0 for item in evidence]
        return allocate(tasks, scales, options.budget)
    must_keep = {task.layer.name: task.must_keep for task in tasks}
    budgets = layer_budgets([task.layer for task in tasks], options.budget, must_keep)
    return [budget.pruned for budget in budgets], budget_warnings(budgets)


def _halves(
    statistics: RoutingStatistics, options: SelectionOptions, protected: Protection
) -> tuple[Halves | None, list[str]]:
    """The tasks of the even and the odd half of the trajectories, and warnings; None when every domain lies in one
    half alone.

    Domains have the same shares in both halves as in the whole, so that a few long trajectories do not make the halves
    differ in kind. keep_at_least is left to the whole: it may be out of reach for one half.
    """
    assert not isinstance(options.criterion, PruneSetFile)
    if not statistics.half:
        return None, []
    missing = sorted({domain for part in PARTS for domain in absent(statistics, options.mix, part)})
    mix = options.mix | dict.fromkeys(missing, 0.0)
    known = any(mix.get(domain, 1.0) > 0 for domain in statistics.domains)
    warnings = []
    if missing:
        warnings.append(
            f"stability {'leaves out' if known else 'is not known:'} {', '.join(missing)}: one half of the "
            "trajectories has no counted token of it; record more trajectories"
        )
    if not known:
        return None, warnings
    free = replace(protected, shares={})
    even, odd = (
        layer_tasks(gather(statistics, balanced(statistics, mix, part), part=part), options.criterion, free)
        for part in PARTS
    )
    return (even, odd), warnings


def _layer_plan(layer: Layer, solution: Solution, stable: dict[str, float] | None) -> LayerPlan:
    gap = None if solution.bound is None else gap_of(solution.cost, solution.bound)
    return LayerPlan(
        name=layer.name,
        num_experts=layer.num_experts,
        top_k=layer.top_k,
        num_groups=layer.num_groups,
        kept=tuple(np.flatnonzero(~solution.pruned).tolist()),
        cost=solution.cost,
        bound=solution.bound,
        gap=gap if gap is None or math.isfinite(gap) else None,
        status=solution.status,
        stability=stable,
    )


def _layer_warnings(evidence: LayerEvidence, solution: Solution) -> list[str]:
    """Warnings about one layer: dead experts, the solver's own warnings, ties."""
    name, warnings = evidence.layer.name, []
    dead = np.flatnonzero(evidence.dead)
    if len(dead):
        kept = dead[~solution.pruned[dead]]
        tail = f"; {_ids(kept)} stay all the same (budget, groups or must_keep)" if len(kept) else ""
        warnings.append(f"{name}: no token was routed to {_ids(dead)}: scored 0 and pruned first{tail}")
    warnings += [f"{name}: {sentence}" for sentence in solution.warnings]
    if solution.status == "time_limit":
        warnings.append(f"{name}: the solver ran out of time; the set is feasible but nothing more is known")
    if solution.ties:
        pruned, kept = (sorted({pair[side] for pair in solution.ties}) for side in (0, 1))
        warnings.append(
            f"{name}: tie: pruning {_ids(kept)} in place of {_ids(pruned)} costs the same; the lowest ids went"
        )
    return warnings


def _mix_warnings(options: SelectionOptions) -> list[str]:
    weights = {domain: weight for domain, weight in options.mix.items() if weight not in (0, 1)}
    if not weights or not isinstance(options.criterion, WorstDomain):
        return []
    return [f"selection.mix: the weights {weights} have no effect: worst_domain compares shares of domains"]


def _super_warnings(protected: Protection, options: SelectionOptions) -> list[str]:
    if options.budget.protect_super_experts and not protected.super_experts:
        return ["selection.budget.protect_super_experts: no expert has extreme outputs"]
    return [f"{name}: super-{_ids(experts)} kept" for name, experts in protected.super_experts.items()]


def _unstable(layers: list[LayerPlan]) -> list[str]:
    unstable = [layer for layer in layers if layer.stability and layer.stability["jaccard"] < UNSTABLE]
    if not unstable:
        return []
    worst = min(unstable, key=lambda layer: (layer.stability or {})["jaccard"])
    return [
        f"unstable sets in {len(unstable)} of {len(layers)} layers: the halves of the trajectories agree on less than "
        f"{UNSTABLE:.0%} of the pruned experts (least in {worst.name}: {(worst.stability or {})['jaccard']:.0%}); "
        "record more tokens"
    ]


def _ids(experts: Any) -> str:
    listing = ", ".join(map(str, list(experts)[:12]))
    return f"expert{'s' if len(experts) > 1 else ''} {listing}{' ...' if len(experts) > 12 else ''}"
