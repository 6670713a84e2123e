"""Which weights of a model the dense methods can see: every linear map inside its decoder blocks, by role."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moeprune.artifacts.errors import InputError
from moeprune.dense.experts import FusedExperts, find_fused_experts
from moeprune.models.layers import decoder_layers

_SHARED = re.compile(r"shared")
_MIXER = re.compile(r"attn|attention|mamba|mixer|conv|ssm|temporal|rwkv|recurrent")  # whatever mixes tokens
_MLP = re.compile(r"mlp|feed_forward|ffn|^fc\d$|^dense$")
_ROUTER = re.compile(r"^(gate|router|\w*expert_gate)$")


@dataclass(frozen=True)
class Weight:
    """One matrix (out, in): a Linear module's, or one expert's part of a fused tensor."""

    name: str  # module path; of a fused expert `...experts.7.down_proj`
    role: str  # attention (any token mixer), dense_mlp, shared_expert, routed_expert, or other
    block: int
    module: nn.Module  # the Linear, or the fused experts
    part: str  # parameter name in the module
    expert: int | None = None
    transposed: bool = False  # stored (in, out)

    @property
    def parameter(self) -> nn.Parameter:
        return getattr(self.module, self.part)  # looked up each time: an expert-pruned model swaps its tensors

    @property
    def _stored(self) -> torch.Tensor:
        stored = self.parameter.detach() if self.expert is None else self.parameter.detach()[self.expert]
        return stored.T if self.transposed else stored

    @property
    def shape(self) -> tuple[int, int]:
        out_features, in_features = self._stored.shape
        return out_features, in_features

    @property
    def dtype(self) -> torch.dtype:
        return self.parameter.dtype

    def read(self) -> torch.Tensor:
        """A float32 copy (out, in), contiguous."""
        return self._stored.to(torch.float32, copy=True, memory_format=torch.contiguous_format).contiguous()

    def write(self, weight: torch.Tensor) -> None:
        """Put (out, in) values back in the stored dtype and layout."""
        with torch.no_grad():
            self._stored.copy_(weight)


@dataclass(frozen=True)
class Left:
    """A matrix of the model that no method may touch, and why."""

    name: str
    parameters: int
    reason: str


@dataclass(frozen=True)
class Seen:
    """Everything found in a model."""

    blocks: tuple[tuple[str, nn.Module], ...]  # decoder blocks in order, with their paths
    weights: tuple[Weight, ...]
    left: tuple[Left, ...]
    experts: tuple[FusedExperts, ...]
    tied: dict[Weight, Weight]  # weight that shares its storage with an earlier one of its block -> that one


def look(model: Any) -> Seen:
    """The decoder blocks and their matrices. Raises InputError for a model without decoder blocks."""
    blocks = decoder_blocks(model)
    experts = find_fused_experts(model)
    weights: list[Weight] = []
    left: list[Left] = []
    prefixes = {f"{name}.": number for number, (name, _) in enumerate(blocks)}
    for prefix, number in prefixes.items():
        for matrix in _of_block(model, prefix, number, experts):
            if isinstance(matrix, Weight):
                weights.append(matrix)
            else:
                left.append(matrix)
    left += _other_matrices(model, weights, left, tuple(prefixes))
    weights, tied, more = _untied(weights)
    return Seen(tuple(blocks), tuple(weights), (*left, *more), tuple(experts), tied)


def _other_matrices(model: nn.Module, weights: list[Weight], left: list[Left], prefixes: tuple[str, ...]) -> list[Left]:
    """Every parameter with two or more axes that is in neither list yet."""
    known = {f"{weight.name.removesuffix('.weight')}.weight" for weight in weights if weight.expert is None}
    known |= {f"{item.name}.weight" for item in left}
    fused = {id(weight.parameter) for weight in weights}
    rest = []
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or name in known or id(parameter) in fused:
            continue
        if not name.startswith(prefixes):
            reason = "outside the decoder blocks"
        elif any(_ROUTER.match(part) for part in name.split(".")):
            reason = "router"
        else:
            reason = "not a linear map that is understood"
        rest.append(Left(name, parameter.numel(), reason))
    return rest


def decoder_blocks(model: Any) -> list[tuple[str, nn.Module]]:
    """The decoder layers in order, with their paths. Raises InputError for an encoder-decoder."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise InputError(
            f"{model.config.model_type}: no stack of decoder blocks found; dense methods walk decoder-only models"
        )
    return [(name, model.get_submodule(name)) for name in decoder_layers(model)]


def _of_block(model: nn.Module, prefix: str, number: int, experts: list[FusedExperts]) -> Iterator[Weight | Left]:
    block = model.get_submodule(prefix[:-1])
    moe = {fused.name.rpartition(".")[0] for fused in experts if fused.name.startswith(prefix)} - {prefix[:-1]}
    for path, module in block.named_modules():
        name = f"{prefix}{path}"
        if isinstance(module, nn.Linear):
            role = _role(path, name, moe)
            if role == "router":
                yield Left(name, module.weight.numel(), "router")
            else:
                yield Weight(name, role, number, module, "weight")
    for fused in experts:
        if fused.name.startswith(prefix):
            for expert in range(fused.count):
                for part in fused.parts:
                    name = f"{fused.name}.{expert}.{part}"
                    yield Weight(name, "routed_expert", number, fused.module, part, expert, fused.transposed)


def _role(path: str, name: str, moe: set[str]) -> str:
    """The role of a Linear by its path inside the block; the first telling component decides."""
    parts = path.split(".")
    if any(_ROUTER.match(part) for part in parts) or ("router" in path and not _SHARED.search(path)):
        return "router"
    if any(_SHARED.search(part) for part in parts):
        return "shared_expert"
    if "experts" in parts:
        return "routed_expert"
    for part in parts:
        if _MIXER.search(part):
            return "attention"
        if _MLP.search(part):
            inside = any(name.startswith(f"{block}.") for block in moe)  # part of a MoE block, and no expert
            return "other" if inside else "dense_mlp"
    return "other"


def _untied(weights: list[Weight]) -> tuple[list[Weight], dict[Weight, Weight], list[Left]]:
    """Weights with storage of their own; those tied inside a block follow the first, across blocks they are left."""
    by_storage: dict[tuple[Any, ...], list[Weight]] = {}
    for weight in weights:
        by_storage.setdefault(_storage(weight), []).append(weight)
    kept: list[Weight] = []
    tied: dict[Weight, Weight] = {}
    left: list[Left] = []
    for weight in weights:
        family = by_storage[_storage(weight)]
        if len({member.block for member in family}) > 1:
            left.append(Left(weight.name, weight.parameter.numel(), "tied across blocks"))
            continue
        if weight is not family[0]:
            tied[weight] = family[0]
        kept.append(weight)
    return kept, tied, left


def _storage(weight: Weight) -> tuple[Any, ...]:
    """Equal for weights that share their memory; a parameter without memory (on the meta device) is shared whole."""
    stored = weight.parameter
    return stored.device, id(stored) if stored.is_meta else stored.data_ptr(), weight.expert
