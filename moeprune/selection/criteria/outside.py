"""Criteria from outside: a class of your own, `package.module:Class`, and `file`, a prune set made elsewhere.

The file decides how many experts go. It is JSON, one of
    a plan.json of moeprune;
    {"pruned": {LAYER: [ids], ...}}     ids that go, in the original numbering
    {"kept": {LAYER: [ids], ...}}       ids that stay
    {LAYER: [ids], ...}                 the same as "pruned"
where LAYER is the module path of the MoE block ("model.layers.3.mlp") or its ordinal among the MoE layers ("0", "1").
Every MoE layer of the statistics must be there.
"""

import importlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import read_json
from moeprune.artifacts.plan import FORMAT, PrunePlan
from moeprune.artifacts.statistics import Layer
from moeprune.selection.criteria.criterion import LayerEvidence
from moeprune.selection.objective import Objective


class Custom(BaseModel):
    """A criterion of your own: `name` is `package.module:Class`, every other key goes to the class as a keyword.

    The object needs `objective(evidence: LayerEvidence) -> Objective`.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")

    def objective(self, evidence: LayerEvidence) -> Objective:
        objective = self.build().objective(evidence)
        size = getattr(objective, "size", None)
        if not hasattr(objective, "marginal_costs") or size != evidence.layer.num_experts:
            raise InputError(
                f"selection.criterion: {self.name!r}: objective() gave {type(objective).__name__} of size {size} for "
                f"the {evidence.layer.num_experts} experts of {evidence.layer.name}; return an Objective with one cost "
                "an expert, such as Modular(scores) of moeprune.selection.objective"
            )
        return objective

    def layer_scale(self, evidence: LayerEvidence) -> float:
        criterion = self.build()
        if hasattr(criterion, "layer_scale"):
            return float(criterion.layer_scale(evidence))
        return criterion.objective(evidence).cost(np.ones(evidence.layer.num_experts, dtype=bool))

    def warnings(self, evidence: LayerEvidence) -> list[str]:
        criterion = self.build()
        return list(criterion.warnings(evidence)) if hasattr(criterion, "warnings") else []

    @property
    def sources(self) -> list[Path]:
        """The files of the module that is named and of the one that holds the class; a notebook has none."""
        modules = dict.fromkeys((self.name.partition(":")[0], type(self.build()).__module__))
        files = [getattr(importlib.import_module(module), "__file__", None) for module in modules]
        return [Path(file) for file in files if file is not None]

    def build(self) -> Any:
        """The object. Raises InputError when it cannot be imported or made."""
        module_name, _, class_name = self.name.partition(":")
        place = f"selection.criterion: {self.name!r}"
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise InputError(f"{place}: cannot import {module_name} ({error}); is it on the Python path?") from error
        if not hasattr(module, class_name):
            raise InputError(f"{place}: {module_name} has no {class_name}")
        try:
            criterion = getattr(module, class_name)(**(self.model_extra or {}))
        except (TypeError, ValueError) as error:
            raise InputError(f"{place}: {class_name} refuses its options ({error})") from error
        if not hasattr(criterion, "objective"):
            raise InputError(f"{place}: {class_name} has no method objective(evidence)")
        return criterion


class PruneSetFile(BaseModel):
    """A fixed prune set; no objective, so no cost and no bound."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Literal["file"] = "file"
    path: Path

    def pruned(self, layers: tuple[Layer, ...]) -> dict[str, tuple[int, ...]]:
        """Layer name -> ascending ids to prune. Raises InputError when the file does not fit these layers."""
        value = read_json(self.path)
        if not isinstance(value, dict):
            raise InputError(f"{self.path}: not a prune set; expected a JSON object of layer -> ids")
        if value.get("format") == FORMAT:
            plan = PrunePlan.parse(value, place=str(self.path))
            value = {"kept": {layer.name: list(layer.kept) for layer in plan.layers}}
        keep = "kept" in value
        sets = value.get("kept" if keep else "pruned", value)
        if not isinstance(sets, dict):
            raise InputError(f"{self.path}: {'kept' if keep else 'pruned'} must be a JSON object of layer -> ids")
        known = {layer.name for layer in layers} | {str(ordinal) for ordinal in range(len(layers))}
        for unknown in set(sets) - known:
            raise InputError(f"{self.path}: layer {unknown!r} is not an MoE layer of the statistics ({_names(layers)})")
        return {layer.name: self._one(sets, layer, ordinal, keep=keep) for ordinal, layer in enumerate(layers)}

    def _one(self, sets: dict[str, Any], layer: Layer, ordinal: int, *, keep: bool) -> tuple[int, ...]:
        ids = sets.get(layer.name, sets.get(str(ordinal)))
        if ids is None:
            raise InputError(f"{self.path}: no entry for {layer.name} (or its ordinal {ordinal!r})")
        limit = layer.num_experts
        if not isinstance(ids, list) or any(type(e) is not int or not 0 <= e < limit for e in ids):
            raise InputError(f"{self.path}: {layer.name}: expert ids must be integers in 0..{limit - 1}, got {ids!r}")
        if len(set(ids)) != len(ids):
            raise InputError(f"{self.path}: {layer.name}: an expert id is listed twice")
        return tuple(sorted(set(range(limit)) - set(ids) if keep else ids))


def _names(layers: tuple[Layer, ...]) -> str:
    return f"{layers[0].name} .. {layers[-1].name}, or ordinals 0 .. {len(layers) - 1}"
