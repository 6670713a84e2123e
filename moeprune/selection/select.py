"""Statistics in, prune plan out. Needs no model."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.plan import LayerPlan, PrunePlan
from moeprune.artifacts.statistics import RoutingStatistics
from moeprune.selection.budget import LayerBudget, budget_warnings, group_of, layer_budgets
from moeprune.selection.certificate import PROVED, lower_bound
from moeprune.selection.evidence import LayerEvidence, gather
from moeprune.selection.objective import restrict
from moeprune.selection.options import SelectionOptions
from moeprune.selection.problem import Problem, Solution
from moeprune.selection.prune_set import PruneSetFile

Progress = Callable[[int, int], None]


def select(
    statistics: RoutingStatistics, options: SelectionOptions, *, on_progress: Progress | None = None
) -> PrunePlan:
    """Which experts of every layer are kept. Deterministic, and independent of the unit of the statistics.

    Experts that were never routed go first and are named in the plan's warnings. `on_progress(done, layers)` is called
    after every layer. Raises InputError when the budget cannot be met or nothing would be removed.
    """
    evidence = gather(statistics, options.mix)
    if isinstance(options.criterion, PruneSetFile):
        layers, warnings = _from_file(options.criterion, evidence, options)
    else:
        budgets = layer_budgets(statistics.layers, options.budget)
        warnings = budget_warnings(budgets)
        layers = []
        for index, (item, layer_budget) in enumerate(zip(evidence, budgets)):
            plan, said = select_layer(item, layer_budget, options)
            layers.append(plan)
            warnings += said
            if on_progress is not None:
                on_progress(index + 1, len(evidence))
    return PrunePlan(
        model_type=str(statistics.manifest["model"].get("model_type", "")),
        model_fingerprint=statistics.fingerprint,
        statistics_key=statistics.key,
        criterion=_written(options.criterion),
        solver=_written(options.solver),
        budget=_written(options.budget),
        mix={domain: options.mix.get(domain, 1.0) for domain in statistics.domains},
        layers=tuple(layers),
        warnings=tuple(warnings),
    )


def select_layer(
    evidence: LayerEvidence, budget: LayerBudget, options: SelectionOptions
) -> tuple[LayerPlan, list[str]]:
    """One layer's plan and the sentences the user must hear."""
    assert not isinstance(options.criterion, PruneSetFile)
    name = evidence.layer.name
    warnings = options.criterion.warnings(evidence)
    solution, bound_warnings = solve_layer(evidence, budget, options)
    warnings += _dead_warnings(evidence, solution.pruned)
    warnings += [f"{name}: {sentence}" for sentence in (*solution.warnings, *bound_warnings)]
    if solution.ties:
        gone = sorted({pair[0] for pair in solution.ties})
        stay = sorted({pair[1] for pair in solution.ties})
        warnings.append(
            f"{name}: tie: pruning {_ids(stay)} in place of {_ids(gone)} costs the same; the lowest ids went"
        )
    return _layer_plan(evidence, solution), warnings


def solve_layer(evidence: LayerEvidence, budget: LayerBudget, options: SelectionOptions) -> tuple[Solution, list[str]]:
    """The solution over all experts of the layer: dead ones first, then the solver on the rest, then the bound."""
    assert not isinstance(options.criterion, PruneSetFile)
    objective = options.criterion.objective(evidence)
    _check_finite(objective, evidence)
    fixed, free = _dead_first(evidence, budget)
    group = group_of(evidence.layer)
    quota = np.full(evidence.layer.num_groups, budget.pruned // evidence.layer.num_groups)
    quota -= np.bincount(group[fixed], minlength=len(quota))
    problem = Problem(restrict(objective, free, fixed), group[free], quota)
    solution = options.solver.solve(problem)
    pruned = np.zeros(evidence.layer.num_experts, dtype=bool)
    pruned[fixed] = True
    pruned[free[solution.pruned]] = True
    cost = objective.cost(pruned)
    solution, warnings = certified(problem, solution) if options.solver.certificate else (solution, [])
    constant = cost - problem.objective.cost(solution.pruned)
    ties = tuple((int(free[i]), int(free[j])) for i, j in solution.ties)
    bound = None if solution.bound is None else min(cost, solution.bound + constant)
    if bound is not None and solution.status == "proved_optimal":
        bound = cost
    return replace(solution, pruned=pruned, cost=cost, bound=bound, ties=ties), warnings


def certified(problem: Problem, solution: Solution) -> tuple[Solution, list[str]]:
    """The solution with a lower bound and the status it earns, and what is to be said about the bound."""
    if solution.bound is not None:
        return solution, []
    bound = lower_bound(problem, incumbent=solution.pruned)
    if bound is None:
        return solution, ["this criterion has no quadratic form, so there is no bound"]
    assert bound.value <= solution.cost + PROVED * abs(solution.cost), "a bound above a feasible cost"
    value = min(bound.value, solution.cost)
    proved = gap_of(solution.cost, value) <= PROVED
    better = "proved_optimal" if proved else "certified_gap" if solution.status == "local_optimum" else solution.status
    return replace(solution, bound=solution.cost if proved else value, status=better), list(bound.warnings)


def gap_of(cost: float, bound: float) -> float:
    """(cost - bound) / |cost|, 0 when both are the same."""
    return 0.0 if cost == bound else (cost - bound) / abs(cost) if cost else math.inf


def _dead_first(evidence: LayerEvidence, budget: LayerBudget) -> tuple[np.ndarray, np.ndarray]:
    """Ids of the dead experts that go in any case (lowest first, as many as the groups allow), and of the free ones."""
    group = group_of(evidence.layer)
    quota = budget.pruned // evidence.layer.num_groups
    may_go = np.ones(evidence.layer.num_experts, dtype=bool)
    may_go[list(budget.must_keep)] = False
    fixed: list[int] = []
    for index in range(evidence.layer.num_groups):
        fixed += np.flatnonzero(evidence.dead & may_go & (group == index))[:quota].tolist()
    may_go[fixed] = False
    return np.array(fixed, dtype=int), np.flatnonzero(may_go)


def _layer_plan(evidence: LayerEvidence, solution: Solution) -> LayerPlan:
    layer = evidence.layer
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
    )


def _dead_warnings(evidence: LayerEvidence, pruned: np.ndarray) -> list[str]:
    dead = np.flatnonzero(evidence.dead)
    if not len(dead):
        return []
    stay = dead[~pruned[dead]]
    tail = f"; {_ids(stay)} stay all the same (budget, groups or must_keep)" if len(stay) else ""
    return [f"{evidence.layer.name}: no token was routed to {_ids(dead)}: scored 0 and pruned first{tail}"]


def _ids(experts: Any) -> str:
    listed = ", ".join(map(str, list(experts)[:12]))
    return f"expert{'s' if len(experts) > 1 else ''} {listed}{' ...' if len(experts) > 12 else ''}"


def _check_finite(objective: Any, evidence: LayerEvidence) -> None:
    for values in (objective.linear, objective.quadratic):
        if values is not None and not np.isfinite(values).all():
            raise InputError(
                f"{evidence.layer.name}: some costs are not finite; the statistics are damaged, record again"
            )


def _written(options: Any) -> dict[str, Any]:
    return dict(options.model_dump(mode="json"))


def _from_file(
    criterion: PruneSetFile, evidence: list[LayerEvidence], options: SelectionOptions
) -> tuple[list[LayerPlan], list[str]]:
    """The plan a prune-set file asks for; its counts are compared with the budget, and win."""
    layers = tuple(item.layer for item in evidence)
    sets = criterion.pruned(layers)
    plans, warnings = [], []
    wanted = {item.layer.name: item.pruned for item in layer_budgets(layers, options.budget)}
    for item in evidence:
        pruned = sets[item.layer.name]
        layer = item.layer
        if len(pruned) != wanted[layer.name]:
            warnings.append(
                f"{layer.name}: {criterion.path} removes {len(pruned)} experts, selection.budget asks for "
                f"{wanted[layer.name]}; the file decides"
            )
        kept = tuple(expert for expert in range(layer.num_experts) if expert not in set(pruned))
        plans.append(
            LayerPlan(
                name=layer.name,
                num_experts=layer.num_experts,
                top_k=layer.top_k,
                num_groups=layer.num_groups,
                kept=kept,
            )
        )
    return plans, warnings
