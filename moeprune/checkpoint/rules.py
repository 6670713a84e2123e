"""Whether a plan can be carried out on a checkpoint: checked before anything is written."""

from collections import defaultdict

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.plan import PrunePlan
from moeprune.artifacts.statistics import Layer
from moeprune.checkpoint.inventory import Inventory, checkpoint_fingerprint
from moeprune.checkpoint.options import MtpPolicy


def require_plan_fits(checkpoint: Inventory, plan: PrunePlan, mtp: MtpPolicy) -> int:
    """The number of experts every layer keeps. Raises InputError with the way out when the plan cannot be written."""
    place = str(checkpoint.directory)
    if not checkpoint.layers:
        raise InputError(f"{place}: a dense model, with no experts to prune; use `moeprune compress` for dense weights")
    kept = _uniform_count(plan)
    plan.require_model(checkpoint_fingerprint(checkpoint), place)
    plan.require_layers(checkpoint.layers, place)
    for layer in checkpoint.layers:
        require_routable(layer, plan.kept[layer.name])
    if checkpoint.mtp and mtp == "refuse":
        first = checkpoint.mtp[0].name
        raise InputError(
            f"{place}: {len(checkpoint.mtp)} tensors are of multi-token-prediction layers (first: {first}); they "
            "have experts of their own that no statistics were recorded for, and a full head on a pruned model does "
            "not load. Set checkpoint.mtp=drop (--mtp drop) to leave them out; speculative decoding with them goes too"
        )
    return kept


def _uniform_count(plan: PrunePlan) -> int:
    if plan.uniform_count is not None:
        return plan.uniform_count
    layers = defaultdict(list)
    for layer in plan.layers:
        layers[len(layer.kept)].append(layer.name)
    text = "; ".join(f"{count} in {', '.join(names)}" for count, names in sorted(layers.items()))
    raise InputError(
        f"plan: the layers keep different numbers of experts ({text}), but a config holds one count for all: "
        "transformers and serving engines load nothing else; use selection.budget.scope=layer, or evaluate in memory"
    )


def require_routable(layer: Layer, kept: tuple[int, ...]) -> None:
    """Raises InputError unless the router still works with the kept experts: top_k, and the groups' rules."""
    count = len(kept)
    if count < max(layer.top_k, 2):
        raise InputError(
            f"{layer.name}: keeps {count} experts but the router picks top_k={layer.top_k} and needs at least 2; lower "
            "selection.budget.prune"
        )
    groups = layer.num_groups
    if groups <= 1:
        return
    size = layer.num_experts // groups
    per_group = {sum(expert // size == group for expert in kept) for group in range(groups)}
    if len(per_group) > 1:
        raise InputError(
            f"{layer.name}: the router has {groups} groups of {size} experts and the plan keeps {sorted(per_group)} of "
            "them; experts would change group, keep the same number in each"
        )
    if count // groups < layer.group_minimum:
        raise InputError(
            f"{layer.name}: keeps {count // groups} experts in each of {groups} groups, whose score needs "
            f"{layer.group_minimum}; lower selection.budget.prune"
        )
    reachable = layer.topk_group * count // groups
    if reachable < layer.top_k:
        raise InputError(
            f"{layer.name}: a token may draw from {layer.topk_group} of {groups} groups, so {reachable} of {count} "
            f"experts are in reach, but the router picks top_k={layer.top_k}; lower selection.budget.prune"
        )
