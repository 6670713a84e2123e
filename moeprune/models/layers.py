"""Find the MoE layers of a loaded model. Fails closed: an architecture that is not understood is refused."""

import hashlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.statistics import Layer
from moeprune.models.families import Family, family_of

# Attributes of routers, under the names of different families.
SCALINGS = ("routed_scaling_factor", "router_scaling_factor", "route_scale")
BIASES = ("e_score_correction_bias", "expert_bias")  # of the router or of the block


@dataclass(frozen=True)
class MoELayer:
    """One MoE layer of a loaded model: what selection needs to know (`info`) and the modules that do the work."""

    info: Layer
    block: nn.Module  # router, experts and, in some families, shared experts
    experts: nn.Module  # forward(hidden (tokens, hidden), top_k_index (tokens, k), top_k_weights (tokens, k))
    router: nn.Module
    family: Family

    @property
    def name(self) -> str:
        return self.info.name


def find_moe_layers(model: nn.Module) -> list[MoELayer]:
    """The MoE layers in forward order.

    Raises InputError for a dense model, an unknown or refused family, and a block whose parts are not understood.
    """
    config: Any = model.config
    found = [(name, module) for name, module in model.named_modules() if _is_experts(name, module)]
    if not found and config.model_type not in _known_types(config):
        raise InputError(
            f"{config.model_type}: no MoE layers found, this is a dense model or an unknown architecture; nothing to "
            "prune. Use `moeprune compress` for dense weights"
        )
    family = family_for(config)
    if not found:
        raise InputError(f"{config.model_type}: a supported family, but this model has no MoE layer; nothing to prune")
    return [_layer(model, name, experts, family) for name, experts in found]


def family_for(config: Any) -> Family:
    """The family of a config, which may nest its language model's config."""
    for candidate in (config, config.get_text_config()):
        if candidate.model_type in _known_types(candidate):
            return family_of(candidate.model_type)
    return family_of(config.model_type)


def fingerprint(model_type: str, layers: Iterable[Layer], router_weights: Iterable[np.ndarray]) -> str:
    """16 hex digits from the model type, the MoE layers' names and sizes, and the router weights as float32.

    The router is never quantised, so a plan made on a bf16 checkpoint fits its FP8 sibling, and not another model.
    """
    digest = hashlib.sha256(model_type.encode())
    for layer, weight in zip(layers, router_weights, strict=True):
        digest.update(f"{layer.name}:{layer.num_experts}:{layer.top_k}:{weight.shape}".encode())
        digest.update(np.ascontiguousarray(weight, dtype=np.float32).tobytes())
    return digest.hexdigest()[:16]


def model_fingerprint(model: nn.Module, layers: list[MoELayer]) -> str:
    """`fingerprint` of a loaded model; equals the checkpoint's when it was loaded at its own or a wider dtype."""
    config: Any = model.config
    weights = [router_weight(layer).detach().float().cpu().numpy() for layer in layers]
    return fingerprint(config.model_type, [layer.info for layer in layers], weights)


def router_weight(layer: MoELayer) -> torch.Tensor:
    """The router's projection (experts, hidden)."""
    weights = [p for p in layer.router.parameters() if p.ndim == 2 and p.shape[0] == layer.info.num_experts]
    if len(weights) != 1:
        raise InputError(
            f"{layer.name}: expected one router weight with {layer.info.num_experts} rows, found {len(weights)}"
        )
    return weights[0]


def choice_bias(layer: MoELayer) -> torch.Tensor | None:
    """What is added to the experts' scores (experts,) when they are chosen, but not in gates; None where nothing is."""
    found = [getattr(module, name, None) for module in (layer.router, layer.block) for name in BIASES]
    return next((bias.detach().float().reshape(-1) for bias in found if isinstance(bias, torch.Tensor)), None)


def _known_types(config: Any) -> set[str]:
    from moeprune.models.families import FAMILIES

    return {config.model_type} & set(FAMILIES)


def _is_experts(name: str, module: nn.Module) -> bool:
    """Whether the module honours the experts contract of transformers 5 (argument names vary, the order does not)."""
    if name.rpartition(".")[2] != "experts":
        return False
    parameters = list(inspect.signature(type(module).forward).parameters)[1:]
    return len(parameters) == 3 and parameters[0].endswith("hidden_states")


def _layer(model: nn.Module, experts_name: str, experts: nn.Module, family: Family) -> MoELayer:
    name = experts_name.rpartition(".")[0]
    block = model.get_submodule(name)
    router = getattr(block, family.router, None)
    if not isinstance(router, nn.Module):
        raise InputError(
            f"{name}: no router named {family.router!r} beside the experts; family {family.model_type} changed"
        )
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    num_experts = {p.shape[0] for p in experts.parameters()}
    if len(num_experts) != 1:
        raise InputError(f"{name}: expert tensors disagree on the number of experts: {sorted(num_experts)}")
    groups, topk_group = (getattr(config, key) or 1 for key in family.group_keys) if family.group_keys else (1, 1)
    info = Layer(
        name=name,
        num_experts=num_experts.pop(),
        top_k=int(getattr(config, family.top_k_key)),
        num_groups=int(groups),
        topk_group=int(topk_group),
        group_minimum=family.group_minimum if groups > 1 else 1,
        routing=family.routing,
        scoring=family.scoring,
        renormalise=bool(getattr(router, "norm_topk_prob", family.renormalises)),
        scaling=next((float(getattr(router, name)) for name in SCALINGS if hasattr(router, name)), 1.0),
    )
    layer = MoELayer(info, block, experts, router, family)
    router_weight(layer)  # refuses a router that is not understood
    return layer
