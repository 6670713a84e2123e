"""The criterion `file`: a prune set made elsewhere. The budget is what the file says.

The file is JSON, one of
    a plan.json of moeprune;
    {"pruned": {LAYER: [ids], ...}}     ids that go, in the original numbering
    {"kept": {LAYER: [ids], ...}}       ids that stay
    {LAYER: [ids], ...}                 the same as "pruned"
where LAYER is the module path of the MoE block ("model.layers.3.mlp") or its ordinal among the MoE layers ("0", "1").
Every MoE layer of the statistics must be there.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import read_json
from moeprune.artifacts.plan import FORMAT, PrunePlan
from moeprune.artifacts.statistics import Layer


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
        gone = set(range(limit)) - set(ids) if keep else set(ids)
        return tuple(sorted(gone))


def _names(layers: tuple[Layer, ...]) -> str:
    return f"{layers[0].name} .. {layers[-1].name}, or ordinals 0 .. {len(layers) - 1}"
