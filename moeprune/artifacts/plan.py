"""The prune plan: which experts of every layer are kept, why, and for which model. A small JSON file."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import read_json, write_json
from moeprune.artifacts.statistics import Layer

FORMAT: Literal["moeprune.plan/1"] = "moeprune.plan/1"
Status = Literal["proved_optimal", "certified_gap", "local_optimum", "time_limit", "not_converged", "given"]


class LayerPlan(BaseModel):
    """What is kept of one layer. `kept` holds ascending expert ids in the ORIGINAL numbering."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  # module path of the MoE block
    num_experts: int
    top_k: int
    num_groups: int = 1
    kept: tuple[int, ...]
    cost: float | None = None  # p'Fp, or the sum of removed scores; original units
    bound: float | None = None  # no selection within the budget costs less; None when not computed
    gap: float | None = None  # (cost - bound) / cost, 0 when the cost is 0
    status: Status = "local_optimum"  # given: a set from a file, which no solver chose
    stability: dict[str, float] | None = None  # jaccard of the two halves' sets, regret of each on the other

    @property
    def pruned(self) -> tuple[int, ...]:
        kept = set(self.kept)
        return tuple(expert for expert in range(self.num_experts) if expert not in kept)

    @model_validator(mode="after")
    def _consistent(self) -> "LayerPlan":
        if list(self.kept) != sorted(set(self.kept)) or any(not 0 <= e < self.num_experts for e in self.kept):
            raise ValueError(f"{self.name}: kept must be ascending, distinct ids in 0..{self.num_experts - 1}")
        if len(self.kept) < self.top_k:
            raise ValueError(f"{self.name}: keeps {len(self.kept)} experts but the router picks top_k={self.top_k}")
        if self.num_groups > 1:
            size = self.num_experts // self.num_groups
            counts = {sum(e // size == group for e in self.kept) for group in range(self.num_groups)}
            if len(counts) > 1:
                raise ValueError(f"{self.name}: the router has {self.num_groups} groups; keep the same number in each")
        for name in ("cost", "bound", "gap"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{self.name}: {name} is {value}")
        return self


class PrunePlan(BaseModel):
    """A complete, self-validating decision; enough to prune a checkpoint without the statistics it came from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["moeprune.plan/1"] = FORMAT
    model_type: str
    model_fingerprint: str
    statistics_key: str
    criterion: dict[str, Any]
    solver: dict[str, Any]
    budget: dict[str, Any]
    mix: dict[str, float]
    layers: tuple[LayerPlan, ...]
    warnings: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _removes_something(self) -> "PrunePlan":
        if not self.layers:
            raise ValueError("the plan has no layers")
        names = [layer.name for layer in self.layers]
        if len(set(names)) < len(names):
            raise ValueError(f"the layer {next(n for n in names if names.count(n) > 1)} stands twice")
        if all(len(layer.kept) == layer.num_experts for layer in self.layers):
            raise ValueError("the plan removes nothing")
        return self

    @property
    def kept(self) -> dict[str, tuple[int, ...]]:
        """Layer name -> kept ids."""
        return {layer.name: layer.kept for layer in self.layers}

    @property
    def uniform_count(self) -> int | None:
        """The number of experts every layer keeps, or None when layers differ."""
        counts = {len(layer.kept) for layer in self.layers}
        return counts.pop() if len(counts) == 1 else None

    def require_model(self, fingerprint: str, place: str) -> None:
        """Raises InputError unless the plan was made for the model with this fingerprint."""
        if fingerprint != self.model_fingerprint:
            raise InputError(
                f"{place}: the plan was made for another model (fingerprint {self.model_fingerprint}, this model has "
                f"{fingerprint}); select again from statistics recorded on this model"
            )

    def require_layers(self, layers: Sequence[Layer], place: str) -> None:
        """Raises InputError unless the plan names exactly these MoE layers, with their numbers of experts and top_k."""
        model_layers = {layer.name: (layer.num_experts, layer.top_k) for layer in layers}
        ours = {layer.name: (layer.num_experts, layer.top_k) for layer in self.layers}
        if odd := sorted(set(ours) ^ set(model_layers)):
            raise InputError(f"{place}: the plan and the model do not have the same MoE layers: {', '.join(odd)}")
        for name, (experts, top_k) in model_layers.items():
            if ours[name] != (experts, top_k):
                raise InputError(
                    f"{place}: {name} has {experts} experts and top_k={top_k}, the plan says {ours[name][0]} and "
                    f"top_k={ours[name][1]}; plans are not to be edited by hand, select again"
                )

    def save(self, path: Path) -> None:
        write_json(Path(path), self.model_dump(mode="json"))

    @classmethod
    def load(cls, path: Path) -> "PrunePlan":
        return cls.parse(read_json(Path(path)), place=str(path))

    @classmethod
    def parse(cls, value: Mapping[str, Any], *, place: str) -> "PrunePlan":
        """Raises InputError naming the place and every field that is wrong."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'plan'}: {e['msg']}" for e in error.errors())
            raise InputError(f"{place}: not a prune plan: {problems}") from error
