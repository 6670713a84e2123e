"""Find the MoE layers of a loaded model. Fails closed: an architecture that is not understood is refused."""

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.statistics import Layer
from moeprune.models.device_map import owned, value
from moeprune.models.families import FAMILIES, Family, family_of

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
    extra: int = 0  # classes of the router, after the experts, that are none

    @property
    def name(self) -> str:
        return self.info.name

    def is_in(self, module: str) -> bool:
        """Whether the block lies in the module of this name, or is it."""
        return f"{self.name}.".startswith(f"{module}.")


def find_moe_layers(model: nn.Module) -> list[MoELayer]:
    """The MoE layers in forward order.

    Raises InputError for a dense model, an unknown or refused family, and a block whose parts are not understood.
    """
    config: Any = model.config
    matches = [(name, module) for name, module in model.named_modules() if _is_experts(name, module, config)]
    if not matches and not _known_types(config):
        raise InputError(
            f"{config.model_type}: no MoE layers found, this is a dense model or an unknown architecture; nothing to "
            "prune. Use `moeprune compress` for dense weights"
        )
    family = family_for(config)
    if not matches:
        raise InputError(f"{config.model_type}: a supported family, but this model has no MoE layer; nothing to prune")
    return [_layer(model, name, experts, family) for name, experts in matches]


def moe_layers_if_any(model: nn.Module) -> list[MoELayer]:
    """The MoE layers, none of a dense model. Raises InputError for experts that are not understood."""
    dense = not any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules())
    return [] if dense else find_moe_layers(model)


def decoder_layers(model: nn.Module) -> list[str]:
    """Names of the decoder layers, in order: the elements of the decoder's largest list of modules.

    Raises InputError for a model without such a list.
    """
    decoder: nn.Module = getattr(model, "get_decoder", lambda: model)()
    inside = {id(module) for module in decoder.modules()}
    sizes: dict[str, int] = {}
    for name, module in model.named_modules():
        nested = any(name.startswith(f"{outer}.") for outer in sizes)
        if id(module) in inside and isinstance(module, nn.ModuleList) and len(module) and not nested:
            sizes[name] = sum(parameter.numel() for parameter in module.parameters())
    if not sizes:
        raise InputError(f"{type(model).__name__}: has no list of decoder layers to go through one by one")
    largest = max(sizes, key=lambda name: sizes[name])
    return [f"{largest}.{position}" for position in range(len(model.get_submodule(largest)))]  # type: ignore[arg-type]


@contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, the module is called as `forward`; afterwards as before, by a forward on the instance if it had one."""
    own = module.__dict__.get("forward")  # accelerate's hooks sit on the instance, too
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def family_for(config: Any) -> Family:
    """The family of a config, which may nest its language model's config."""
    for candidate in (config, config.get_text_config()):
        if candidate.model_type in FAMILIES:
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
    """The router's projection (experts, hidden); rows of classes that are no experts follow."""
    rows = layer.info.num_experts + layer.extra
    weights = [(m, name, p) for m, name, p in owned(layer.router) if p.ndim == 2 and p.shape[0] == rows]
    if len(weights) != 1:
        raise InputError(f"{layer.name}: expected one router weight with {rows} rows, found {len(weights)}")
    module, name, _ = weights[0]
    return value(module, name)


def choice_bias(layer: MoELayer) -> torch.Tensor | None:
    """What is added to the experts' scores (experts,) when they are chosen, but not in gates; None where nothing is."""
    places = ((module, name) for module in (layer.router, layer.block) for name in BIASES)
    biases = (value(module, name) for module, name in places if isinstance(getattr(module, name, None), torch.Tensor))
    return next((bias.detach().float().reshape(-1) for bias in biases), None)


def _known_types(config: Any) -> set[str]:
    return {config.model_type, config.get_text_config().model_type} & set(FAMILIES)


def _is_experts(name: str, module: nn.Module, config: Any) -> bool:
    """Whether the module is called as the experts of transformers 5 are (argument names vary, the order does not)."""
    if name.rpartition(".")[2] != "experts":
        return False
    parameters = list(inspect.signature(type(module).forward).parameters)[1:]
    gates_input = any(FAMILIES[name].gates_input for name in _known_types(config))
    return len(parameters) == (1 if gates_input else 3) and parameters[0].endswith("hidden_states")


def _layer(model: nn.Module, experts_name: str, experts: nn.Module, family: Family) -> MoELayer:
    name = experts_name.rpartition(".")[0]
    block = model.get_submodule(name)
    router = getattr(block, family.router, None)
    if not isinstance(router, nn.Module):
        raise InputError(
            f"{name}: no router named {family.router!r} beside the experts; family {family.model_type} changed"
        )
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    counts = getattr(config, family.config_section) if family.config_section else config
    extra = family.extra_classes
    extra = int(getattr(config, extra) or 0) if isinstance(extra, str) else extra
    groups, topk_group = (getattr(config, key) or 1 for key in family.group_keys) if family.group_keys else (1, 1)
    top_k = getattr(counts, family.top_k_key)
    if not isinstance(top_k, int):
        raise InputError(f"{name}: {family.top_k_key} is {top_k}; one number for all layers is supported")
    info = Layer(
        name=name,
        num_experts=_count(name, experts, family, extra),
        top_k=top_k,
        num_groups=int(groups),
        topk_group=int(topk_group),
        group_minimum=family.group_minimum if groups > 1 else 1,
        routing=family.routing,
        gates_input=family.gates_input,
        scoring=family.scoring,
        renormalise=bool(getattr(router, "norm_topk_prob", family.renormalises)),
        scaling=next((float(getattr(router, name)) for name in SCALINGS if hasattr(router, name)), 1.0),
        post_scale=_post_scale(name, block, family),
        null_slots=bool(family.null_slots),
    )
    layer = MoELayer(info, block, experts, router, family, extra)
    router_weight(layer)  # refuses a router that is not understood
    return layer


def _count(name: str, experts: nn.Module, family: Family, extra: int) -> int:
    """The number of experts, from the tensors that hold them."""
    if family.flat_rows:
        return int(experts.num_experts)  # type: ignore[arg-type]
    rows = {p.shape[0] for p in experts.parameters() if p.ndim >= 2}
    if len(rows) != 1 and rows != {min(rows), min(rows) + extra}:
        raise InputError(f"{name}: expert tensors disagree on the number of experts: {sorted(rows)}")
    return min(rows)


def _post_scale(name: str, block: nn.Module, family: Family) -> float:
    """The factor on the experts' gated sum, outside the experts."""
    value = getattr(block, family.post_scale) if family.post_scale else 1.0
    if isinstance(value, str):  # how shared experts are combined with it, where there are any
        value = {"sum": 1.0, "average": 0.5}[value] if hasattr(block, "shared_experts") else 1.0
    return float(value)


def require_movable(model: nn.Module, device_map: Mapping[str, int | str]) -> None:
    """Raises InputError for experts that would wait on disk, or beside a GPU, although their family reads their weights
    where no hook brings them. `device_map` names every part once."""
    waiting = {"disk", "cpu"} if set(device_map.values()) - {"disk", "cpu"} else {"disk"}
    for layer in find_moe_layers(model) if _known_types(model.config) else ():
        name = f"{layer.name}.experts"
        places = {
            place
            for part, place in device_map.items()
            if f"{name}.".startswith(f"{part}." if part else "") or f"{part}.".startswith(f"{name}.")
        }
        if layer.family.flat_rows and places & waiting:
            raise InputError(
                f"runtime.device_map: {name} of {layer.family.model_type} must be on a device: its weights are read "
                "past accelerate's hooks; place them, or leave device_map out and set runtime.streaming=on"
            )


def projection(layer: MoELayer) -> torch.Tensor | None:
    """The matrix (hidden, latent) that what experts put out is mapped with; None where it is in the hidden size."""
    module = getattr(layer.block, layer.family.projection, None) if layer.family.projection else None
    return None if module is None or isinstance(module, nn.Identity) else value(module, "weight")
