"""What a checkpoint becomes in memory: its MoE layers, its parameters, and which of them have an expert axis.

Models are built on the meta device, so nothing here reads a weight.
"""

import copy
import json
import math
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.statistics import Layer
from moeprune.checkpoint.config_json import with_expert_count
from moeprune.models.disk_names import DiskNames
from moeprune.models.families import Family


@dataclass(frozen=True)
class ExpertAxis:
    """Where a parameter runs over experts, `size` rows each. `extra` rows follow theirs and belong to no expert."""

    layer: str
    axis: int
    size: int = 1
    extra: int = 0


class MemoryModel:
    """What a checkpoint becomes in memory: MoE layers, parameter shapes, the expert axis of each, names from disk.

    The expert axes come from the model itself: it is built with its own number of experts and with twice as many, and
    the parameters whose shape changed are those that pruning cuts. So an attention or expert width that happens to
    equal the number of experts is never mistaken for it. A dense model has no layers and no axes.
    Raises InputError for an unknown or refused family and a parameter that depends on the number of experts in a way
    that is not understood.
    """

    def __init__(self, directory: Path, config_json: Mapping[str, Any]) -> None:
        from moeprune.models.layers import moe_layers_if_any, router_weight
        from moeprune.models.loading import empty_model, load_config

        self.config: Any = load_config(directory)
        self.model = empty_model(self.config)
        moe_layers = moe_layers_if_any(self.model)
        self.layers: tuple[Layer, ...] = tuple(layer.info for layer in moe_layers)
        self.num_experts = _common_count(self.layers) if moe_layers else 0
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self.router_weights = {layer.name: names[id(router_weight(layer))] for layer in moe_layers}
        self.extra = {layer.name: layer.extra for layer in moe_layers}
        self.tables = _tables(moe_layers)
        self.expert_axes = self._find_expert_axes(config_json) if moe_layers else {}

    @property
    def elements(self) -> int:
        """Numbers in all of its weights."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def model_type(self) -> str:
        """Of the model that is loaded: the text part's, where a multimodal checkpoint loads as a language model."""
        return str(self.model.config.model_type)

    @property
    def family(self) -> Family:
        """The row of the family table. Raises InputError for a dense model."""
        from moeprune.models.layers import family_for

        return family_for(self.config)

    def _find_expert_axes(self, config_json: Mapping[str, Any]) -> dict[str, ExpertAxis]:
        from moeprune.models.loading import empty_model

        double = with_expert_count(
            copy.deepcopy(dict(config_json)), self.family, self.num_experts, 2 * self.num_experts
        )
        other = {n: tuple(t.shape) for n, t in empty_model(parsed_config(json.dumps(double))).state_dict().items()}
        if set(other) != set(self.shapes):
            name = sorted(set(other) ^ set(self.shapes))[0]
            raise InputError(f"{name}: exists or not depending on the number of experts; this layout is not understood")
        return {
            name: self._expert_axis(name, shape, other[name])
            for name, shape in self.shapes.items()
            if shape != other[name]
        }

    def _expert_axis(self, name: str, shape: tuple[int, ...], doubled: tuple[int, ...]) -> ExpertAxis:
        axes = [axis for axis, (one, two) in enumerate(zip(shape, doubled)) if one != two]
        count = self.num_experts
        layer = next((layer.name for layer in self.layers if name.startswith(layer.name + ".")), None)
        if layer is None:
            raise InputError(f"{name}: its shape {shape} depends on the number of experts, but it is in no MoE block")
        size, rest = divmod(doubled[axes[0]] - shape[axes[0]], count)
        extra = shape[axes[0]] - size * count
        flat = self.family.flat_rows and ".experts." in name
        if len(axes) != 1 or rest or not (size == 1 or flat) or extra not in (0, self.extra[layer]):
            raise InputError(
                f"{name}: shape {shape} becomes {doubled} when {count} experts become {2 * count}; this is not an axis "
                "of experts, and how to cut it is not known"
            )
        return ExpertAxis(layer, axes[0], size, extra)

    def extra_ids(self, layer: str) -> range:
        """Numbers of the router's classes that are no experts."""
        return range(self.num_experts, self.num_experts + self.extra[layer])

    def is_router(self, parameter: str) -> bool:
        """Whether a parameter with an expert axis scores experts rather than being part of them."""
        return not parameter.startswith(self.expert_axes[parameter].layer + ".experts.")

    def target_of(self, name: str) -> str | None:
        """The parameter or buffer that a tensor on disk feeds or is a quantised part of; None when there is none."""
        return self._disk_names.target_of(name)

    @cached_property
    def _disk_names(self) -> DiskNames:
        return DiskNames(self.model)


def parsed_config(text: str) -> Any:
    """The transformers config of a config.json with this text, read as it would be from a checkpoint."""
    from moeprune.models.loading import load_config

    with tempfile.TemporaryDirectory(prefix="moeprune-") as directory:
        (Path(directory) / "config.json").write_text(text, encoding="utf-8")
        return load_config(Path(directory))


def _tables(layers: Iterable[Any]) -> dict[str, str]:
    """Buffer that lists experts by token -> its layer, where a family has such tables."""
    tables = {}
    for layer in layers:
        name = layer.family.expert_table
        if name and hasattr(layer.router, name):
            tables[f"{layer.name}.{layer.family.router}.{name}"] = layer.name
    return tables


def _common_count(layers: Iterable[Layer]) -> int:
    counts = {layer.num_experts for layer in layers}
    if len(counts) != 1:
        text = ", ".join(f"{layer.name} {layer.num_experts}" for layer in layers)
        raise InputError(f"the layers have different numbers of experts ({text}); a config holds one count")
    return counts.pop()
