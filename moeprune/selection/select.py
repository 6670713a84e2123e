"""Statistics in, prune plan out. Needs no model."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.plan import LayerPlan, PrunePlan
from moeprune.artifacts.statistics import Layer, Part, RoutingStatistics
from moeprune.selection.allocation import allocate
from moeprune.selection.budget import budget_warnings, checked_must_keep, layer_budgets
from moeprune.selection.criteria.criterion import LayerEvidence, absent, balanced, gather
from moeprune.selection.criteria.outside import PruneSetFile
from moeprune.selection.criteria.worst_domain import WorstDomain
from moeprune.selection.given_plan import plan_from_file
from moeprune.selection.layer import LayerTask, layer_task, solve_layer
from moeprune.selection.objective import Solution
from moeprune.selection.options import SelectionOptions
from moeprune.selection.solvers.certificate import gap_of
from moeprune.selection.solvers.constraints import super_experts
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


def layer_tasks(
    statistics: RoutingStatistics, options: SelectionOptions
) -> tuple[list[LayerEvidence], list[LayerTask], dict[str, tuple[int, ...]]]:
    """Evidence and task of every layer, and the experts that must stay by layer name."""
    evidence = gather(statistics, options.mix)
    must_keep = checked_must_keep(statistics.layers, options.budget)
    if options.budget.protect_super_experts:
        for name, experts in super_experts(evidence).items():
            must_keep[name] = tuple(sorted({*must_keep.get(name, ()), *experts}))
    return evidence, _tasks(evidence, options, must_keep), must_keep


def _tasks(
    evidence: list[LayerEvidence], options: SelectionOptions, must_keep: dict[str, tuple[int, ...]]
) -> list[LayerTask]:
    assert not isinstance(options.criterion, PruneSetFile)
    shares = _shares(evidence[0], options)
    return [layer_task(item, options.criterion, must_keep.get(item.layer.name, ()), shares) for item in evidence]


def _shares(evidence: LayerEvidence, options: SelectionOptions) -> dict[str, float]:
    """Domain -> share of its routed tokens that must stay. Raises InputError for a domain that is not mixed in."""
    shares = options.budget.keep_at_least
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


def _solved(
    statistics: RoutingStatistics, options: SelectionOptions, on_progress: Progress | None
) -> tuple[list[LayerPlan], list[str]]:
    assert not isinstance(options.criterion, PruneSetFile)
    evidence, tasks, must_keep = layer_tasks(statistics, options)
    if options.budget.scope == "global":
        scales = [options.criterion.layer_scale(item) or 1.0 for item in evidence]
        budgets, warnings = allocate(tasks, scales, options.budget, must_keep)
    else:
        budgets = layer_budgets(statistics.layers, options.budget, must_keep)
        warnings = budget_warnings(budgets)
    weights = {domain: weight for domain, weight in options.mix.items() if weight not in (0, 1)}
    if weights and isinstance(options.criterion, WorstDomain):
        warnings.append(f"selection.mix: the weights {weights} have no effect: worst_domain compares shares of domains")
    warnings += _super_warnings(evidence, options)
    halves = _halves(statistics, options, must_keep, warnings)
    layers = []
    for index, (item, task, budget) in enumerate(zip(evidence, tasks, budgets)):
        solution = solve_layer(task, budget.pruned, options.solver)
        warnings += options.criterion.warnings(item) + _layer_warnings(item, solution)
        stable = None if halves is None else stability(halves[0][index], halves[1][index], budget.pruned)
        layers.append(_layer_plan(item.layer, solution, stable))
        if on_progress is not None:
            on_progress(index + 1, len(evidence))
    return layers, warnings + _unstable(layers)


def _halves(
    statistics: RoutingStatistics,
    options: SelectionOptions,
    must_keep: dict[str, tuple[int, ...]],
    warnings: list[str],
) -> Halves | None:
    """The tasks of the even and the odd half of the trajectories; None when every domain lies in one half alone.

    Domains have the same shares in both halves as in the whole, so that a few long trajectories do not make the halves
    differ in kind. keep_at_least is left to the whole: it may be out of reach for one half.
    """
    if not statistics.half:
        return None
    missing = sorted({domain for part in PARTS for domain in absent(statistics, options.mix, part)})
    mix = options.mix | dict.fromkeys(missing, 0.0)
    known = any(mix.get(domain, 1.0) > 0 for domain in statistics.domains)
    if missing:
        warnings.append(
            f"stability {'leaves out' if known else 'is not known:'} {', '.join(missing)}: one half of the "
            "trajectories has no counted token of it; record more trajectories"
        )
    if not known:
        return None
    free = options.model_copy(update={"budget": options.budget.model_copy(update={"keep_at_least": None})})
    even, odd = (
        _tasks(gather(statistics, balanced(statistics, mix, part), part=part), free, must_keep) for part in PARTS
    )
    return even, odd


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
    """What the user must hear about one layer: dead experts, the solver's own sentences, ties."""
    name, warnings = evidence.layer.name, []
    dead = np.flatnonzero(evidence.dead)
    if len(dead):
        stay = dead[~solution.pruned[dead]]
        tail = f"; {_ids(stay)} stay all the same (budget, groups or must_keep)" if len(stay) else ""
        warnings.append(f"{name}: no token was routed to {_ids(dead)}: scored 0 and pruned first{tail}")
    warnings += [f"{name}: {sentence}" for sentence in solution.warnings]
    if solution.status == "time_limit":
        warnings.append(f"{name}: the solver ran out of time; the set is feasible but nothing more is known")
    if solution.ties:
        gone, stay = (sorted({pair[side] for pair in solution.ties}) for side in (0, 1))
        warnings.append(
            f"{name}: tie: pruning {_ids(stay)} in place of {_ids(gone)} costs the same; the lowest ids went"
        )
    return warnings


def _super_warnings(evidence: list[LayerEvidence], options: SelectionOptions) -> list[str]:
    if not options.budget.protect_super_experts:
        return []
    found = super_experts(evidence)
    if not found:
        return ["selection.budget.protect_super_experts: no expert has extreme outputs"]
    return [f"{name}: super-{_ids(experts)} kept" for name, experts in found.items()]


def _unstable(layers: list[LayerPlan]) -> list[str]:
    shaky = [layer for layer in layers if layer.stability and layer.stability["jaccard"] < UNSTABLE]
    if not shaky:
        return []
    worst = min(shaky, key=lambda layer: (layer.stability or {})["jaccard"])
    return [
        f"unstable sets in {len(shaky)} of {len(layers)} layers: the halves of the trajectories agree on less than "
        f"{UNSTABLE:.0%} of the pruned experts (least in {worst.name}: {(worst.stability or {})['jaccard']:.0%}); "
        "record more tokens"
    ]


def _ids(experts: Any) -> str:
    listed = ", ".join(map(str, list(experts)[:12]))
    return f"expert{'s' if len(experts) > 1 else ''} {listed}{' ...' if len(experts) > 12 else ''}"
