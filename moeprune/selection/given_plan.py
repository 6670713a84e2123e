"""The plan of a prune set made elsewhere: validated, not solved."""

from pydantic import ValidationError

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.plan import LayerPlan
from moeprune.artifacts.statistics import Layer
from moeprune.selection.budget import check_budget, checked_must_keep, layer_budgets
from moeprune.selection.criteria.outside import PruneSetFile
from moeprune.selection.options import SelectionOptions


def plan_from_file(
    criterion: PruneSetFile, layers: tuple[Layer, ...], options: SelectionOptions
) -> tuple[list[LayerPlan], list[str]]:
    """What the file asks for, without cost or bound; its counts are compared with the budget's, and win.

    Raises InputError when the router could not work with what is kept, or an expert of must_keep is pruned.
    """
    sets = criterion.pruned(layers)
    must_keep = checked_must_keep(layers, options.budget)
    check_budget(layers, options.budget)
    wanted = {}
    if options.budget.scope == "layer":
        wanted = {item.layer.name: item.pruned for item in layer_budgets(layers, options.budget)}
    plans: list[LayerPlan] = []
    warnings = _not_applied(criterion, options)
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


def _not_applied(criterion: PruneSetFile, options: SelectionOptions) -> list[str]:
    """What was asked for and asks for a choice or a bound: a set from a file is taken as it is."""
    asked = {
        "budget.keep_at_least": options.budget.keep_at_least is not None,
        "budget.protect_super_experts": options.budget.protect_super_experts,
        "solver.certificate": options.solver.certificate,
    }
    names = [name for name, there in asked.items() if there]
    return [
        f"selection.{name}: not applied; {criterion.path} is a set made elsewhere, taken as it is" for name in names
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
