"""Routed experts as transformers 5 stores them, all of a layer in one tensor, seen as ordinary linear maps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from moeprune.artifacts.errors import InputError


@dataclass(frozen=True)
class FusedExperts:
    """One layer's routed experts: `gate_up_proj` (or `up_proj`) and `down_proj`, expert axis first."""

    name: str
    module: Any

    @property
    def count(self) -> int:
        return int(self.module.down_proj.shape[0])

    @property
    def up(self) -> str:
        return "gate_up_proj" if self.module.has_gate else "up_proj"

    @property
    def parts(self) -> tuple[str, str]:
        return self.up, "down_proj"

    @property
    def transposed(self) -> bool:
        return bool(self.module.is_transposed)

    def apply(self, part: str, expert: int, rows: torch.Tensor) -> torch.Tensor:
        """One expert's map of rows (tokens, in), bias included."""
        weight = getattr(self.module, part)[expert]
        bias = getattr(self.module, f"{part}_bias")[expert] if self.module.has_bias else None
        return linear(rows, weight.T if self.transposed else weight, bias)

    def middle(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        """What reaches the down projection for input rows (tokens, hidden)."""
        out = self.apply(self.up, expert, rows)
        return self.module._apply_gate(out) if self.module.has_gate else self.module.act_fn(out)


def find_fused_experts(model: nn.Module) -> list[FusedExperts]:
    """Modules that honour the fused experts contract; flat rows, gated inputs and norms after the experts do not."""
    experts = []
    for name, module in model.named_modules():
        known = (
            name.rpartition(".")[2] == "experts" and hasattr(module, "has_gate") and hasattr(module, "is_transposed")
        )
        if not known or getattr(module, "has_post_expert_norm", False):
            continue
        fused = FusedExperts(name, module)
        parts = [getattr(module, part, None) for part in fused.parts]
        if all(isinstance(part, nn.Parameter) and part.ndim == 3 for part in parts):
            experts.append(fused)
    return experts


# (expert, rows of the hidden state that reach it, index of each row among the tokens)
Route = Callable[[int, torch.Tensor, torch.Tensor], None]


def routed_rows(
    hidden: torch.Tensor, index: torch.Tensor, gates: torch.Tensor, counted: torch.Tensor | None, visit: Route
) -> None:
    """Call `visit` for every expert with the counted tokens (tokens, hidden) that are routed to it.

    index and gates are (tokens, k), counted (tokens,) bool or None for all. A slot whose gate is 0 is no route.
    """
    live = gates != 0
    if counted is not None:
        live &= counted[:, None]
    tokens, slots = live.nonzero(as_tuple=True)
    experts = index[tokens, slots]
    order = torch.argsort(experts, stable=True)
    tokens, experts = tokens[order], experts[order]
    counts = torch.bincount(experts)
    for expert, rows in enumerate(tokens.split(counts.tolist())):
        if len(rows):
            visit(expert, hidden[rows], rows)


def require_rebuilt(
    fused: FusedExperts, hidden: torch.Tensor, index: torch.Tensor, gates: torch.Tensor, output: torch.Tensor
) -> None:
    """Raises InputError when the expert-by-expert view does not rebuild what the family's own forward returned."""
    ours = torch.zeros_like(output, dtype=torch.float32)

    def add(expert: int, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        result = fused.apply("down_proj", expert, fused.middle(expert, rows)).float()
        gate = (gates[tokens] * (index[tokens] == expert)).sum(1, keepdim=True).float()
        ours.index_add_(0, tokens, result * gate)

    routed_rows(hidden, index, gates, None, add)
    tolerance = 1e-4 if output.dtype == torch.float32 else 3e-2
    distance = float((ours - output).norm() / output.float().norm().clamp(min=1e-12))
    if not distance < tolerance:
        raise InputError(
            f"{fused.name}: experts seen one by one differ from the family's own forward by {distance:.1e}; "
            "routed_expert is not supported for this family, leave it out of targets"
        )
