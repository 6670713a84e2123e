"""A criterion from outside: `package.module:Class`."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from moeprune.artifacts.errors import InputError
from moeprune.selection.evidence import LayerEvidence
from moeprune.selection.objective import Objective


class Custom(BaseModel):
    """A criterion of your own: `name` is `package.module:Class`, every other key goes to the class as a keyword.

    The object needs `objective(evidence: LayerEvidence) -> Objective`.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")

    def objective(self, evidence: LayerEvidence) -> Objective:
        found = self.build().objective(evidence)
        size = getattr(found, "size", None)
        if not hasattr(found, "marginal_costs") or size != evidence.layer.num_experts:
            raise InputError(
                f"selection.criterion: {self.name!r}: objective() gave {type(found).__name__} of size {size} for the "
                f"{evidence.layer.num_experts} experts of {evidence.layer.name}; return an Objective with one cost an "
                "expert, such as Modular(scores) of moeprune.selection.objective"
            )
        return found

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
