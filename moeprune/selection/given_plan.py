"""The plan of a prune set made elsewhere: validated, not solved."""

from pydantic import ValidationError

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.plan import LayerPlan
from moeprune.artifacts.statistics import Layer
from moeprune.selection.budget import known_budgets
from moeprune.selection.criteria.outside import PruneSetFile
from moeprune.selection.options import SelectionOptions
from moeprune.selection.protection import named_experts


def plan_from_file(
    criterion: PruneSetFile, layers: tuple[Layer, ...], options: SelectionOptions
) -> tuple[list[LayerPlan], list[str]]:
    """The plans that the file describes, without cost or bound, and warnings where its counts are not the budget's.

    Raises InputError when the router could not work with what is kept, or an expert of must_keep is pruned.
    """
    sets = criterion.pruned(layers)
    must_keep = named_experts(layers, options.budget)
    wanted = {item.layer.name: item.pruned for item in known_budgets(layers, options.budget, must_keep)}
    plans: list[LayerPlan] = []
    warnings = _without_effect(criterion, options)
    for layer in layers:
        pruned = set(sets[layer.name])
        lost = sorted(pruned & set(must_keep.get(layer.name, ())))
        if lost:
            raise InputError(f"{criterion.path}: {layer.name}: prunes {lost}, which selection.budget.must_keep names")
        if len(pruned) != wanted.get(layer.name, len(pruned)):
            warnings.append(
                f"{layer.name}: {criterion.path} removes {len(pruned)} experts, selection.budget asks for "
                f"{wanted[layer.name]}; the file decides"
            )
        plans.append(_layer_plan(criterion, layer, pruned))
    if not any(sets.values()):
        raise InputError(f"{criterion.path}: removes nothing")
    return plans, warnings


def _without_effect(criterion: PruneSetFile, options: SelectionOptions) -> list[str]:
    """Warnings about options that have no effect on a prune set read from a file."""
    active = {
        "budget.keep_at_least": options.budget.keep_at_least is not None,
        "budget.protect_super_experts": options.budget.protect_super_experts,
        "solver.certificate": options.solver.certificate,
    }
    return [
        f"selection.{name}: not applied; {criterion.path} is a set made elsewhere, taken as it is"
        for name in active
        if active[name]
    ]


def _layer_plan(criterion: PruneSetFile, layer: Layer, pruned: set[int]) -> LayerPlan:
    try:
        return LayerPlan(
            name=layer.name,
            num_experts=layer.num_experts,
            top_k=layer.top_k,
            num_groups=layer.num_groups,
            kept=tuple(expert for expert in range(layer.num_experts) if expert not in pruned),
            status="given",
        )
    except ValidationError as error:
        raise InputError(f"{criterion.path}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from error
