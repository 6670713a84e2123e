"""Which parameter in memory a tensor on disk feeds, and which parameters have an expert axis.

The only module that touches transformers' loading internals (the key renaming of its weight conversions). Models are
built on the meta device, so nothing here reads a weight.
"""

import copy
import json
import math
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.statistics import Layer
from moeprune.checkpoint.config_json import with_expert_count
from moeprune.models.families import Family

# Names that quantised checkpoints give to the parts of one weight: what a module's `weight` becomes ...
_MODULE_PART = re.compile(
    r"\.(?:weight_(?:scale|scale_inv|scale_2|packed|shape|zero_point|g_idx|global_scale)|input_(?:scale|global_scale|zero_point)"
    r"|output_scale|qweight|qzeros|scales|g_idx)$"
)
# ... and what is appended to the name of a fused expert parameter.
_FUSED_PART = re.compile(
    r"_(?:blocks|scales|scale|scale_inv|scale_2|packed|zero_point|global_scale|weight_scale|weight_scale_2|input_scale)$"
)


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
        from moeprune.models.layers import find_moe_layers, router_weight
        from moeprune.models.loading import load_config

        self.config: Any = load_config(directory)
        self.model = empty_model(self.config)
        moe_layers = find_moe_layers(self.model) if _has_experts(self.model) else []
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
        for candidate in (name, _MODULE_PART.sub(".weight", name), _FUSED_PART.sub("", name)):
            renamed = self._renaming.rename(candidate)
            if renamed in self.shapes:
                return renamed
        return None

    @cached_property
    def _renaming(self) -> "_Renaming":
        return _Renaming(self.model)


class _Renaming:
    """Disk name -> name in memory, by the rules transformers loads with; remembered without the expert's id."""

    def __init__(self, model: Any) -> None:
        try:
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
        except ImportError as error:
            import transformers

            raise InputError(
                f"transformers {transformers.__version__} does not tell how it names a checkpoint's tensors ({error}); "
                "install transformers>=5.24,<6"
            ) from error
        rules = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._rename = rename_source_key
        self._prefix = model.base_model_prefix
        self._known = model.state_dict()
        self._remembered: dict[str, str] = {}

    def rename(self, name: str) -> str:
        template = EXPERT_NUMBER.sub("0", name)
        if template not in self._remembered:
            renamed, _ = self._rename(template, self._renamings, self._converters, self._prefix, self._known)
            if renamed not in self._known and template in self._known:  # already a name in memory
                renamed, _ = self._rename(template, [], [], self._prefix, self._known)
            self._remembered[template] = renamed
        return self._remembered[template]


EXPERT_NUMBER = re.compile(r"(?<=\bexperts\.)\d+(?=\.)")  # `shared_experts.0.` has no word border before `experts`


def expert_number(name: str) -> int | None:
    """The expert id in the name of a per-expert tensor; None for any other tensor."""
    match = EXPERT_NUMBER.search(name)
    return int(match.group()) if match else None


def parsed_config(text: str) -> Any:
    """The transformers config of a config.json with this text, read as it would be from a checkpoint."""
    from moeprune.models.loading import load_config

    with tempfile.TemporaryDirectory(prefix="moeprune-") as directory:
        (Path(directory) / "config.json").write_text(text, encoding="utf-8")
        return load_config(Path(directory))


def empty_model(config: Any) -> Any:
    """The model that loading a checkpoint with this config gives, on the meta device: shapes without memory."""
    import torch

    with torch.device("meta"):
        return auto_class(config).from_config(copy.deepcopy(config)).eval()


def auto_class(config: Any) -> Any:
    """The transformers auto class that loads this config: causal language models first, multimodal ones second."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    for candidate in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in candidate._model_mapping:
            return candidate
    raise InputError(f"{config.model_type}: transformers has no language model class for this config")


def model_class(config: Any) -> tuple[Any, Any]:
    """(class, config) as the auto class resolves them: a language model may take only the text part of the config."""
    found = auto_class(config)._model_mapping[type(config)]
    return found, config if found.config_class is type(config) else config.get_text_config()


def _has_experts(model: Any) -> bool:
    """Whether anything in the model is called experts: what is then not understood is refused, not taken for dense."""
    return any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules())


def _tables(layers: Iterable[Any]) -> dict[str, str]:
    """Buffer that lists experts by token -> its layer, where a family has such tables."""
    found = {}
    for layer in layers:
        name = layer.family.expert_table
        if name and hasattr(layer.router, name):
            found[f"{layer.name}.{layer.family.router}.{name}"] = layer.name
    return found


def _common_count(layers: Iterable[Layer]) -> int:
    counts = {layer.num_experts for layer in layers}
    if len(counts) != 1:
        text = ", ".join(f"{layer.name} {layer.num_experts}" for layer in layers)
        raise InputError(f"the layers have different numbers of experts ({text}); a config holds one count")
    return counts.pop()
