"""Which parameter in memory a tensor on disk feeds, by the rules that transformers loads with.

The only user of transformers' renaming internals.
"""

import re
from collections.abc import Iterable
from typing import Any

from moeprune.artifacts.errors import InputError

EXPERT_NUMBER = re.compile(r"(?<=\bexperts\.)\d+(?=\.)")  # `shared_experts.0.` has no word border before `experts`
# Names that quantised checkpoints give to the parts of one weight: what a module's `weight` becomes ...
_MODULE_PART = re.compile(
    r"\.(?:weight_(?:scale|scale_inv|scale_2|packed|shape|zero_point|g_idx|global_scale)|input_(?:scale|global_scale|zero_point)"
    r"|output_scale|qweight|qzeros|scales|g_idx)$"
)
# ... and what is appended to the name of a fused expert parameter.
_FUSED_PART = re.compile(
    r"_(?:blocks|scales|scale|scale_inv|scale_2|packed|zero_point|global_scale|weight_scale|weight_scale_2|input_scale)$"
)


def expert_number(name: str) -> int | None:
    """The expert id in the name of a per-expert tensor; None for any other tensor."""
    match = EXPERT_NUMBER.search(name)
    return int(match.group()) if match else None


class DiskNames:
    """Names on disk -> names in memory of one model. `rules` are those of a load; by default, those of the model."""

    def __init__(self, model: Any, rules: Iterable[Any] | None = None) -> None:
        try:
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
        except ImportError as error:
            import transformers

            raise InputError(
                f"transformers {transformers.__version__} does not tell how it names a checkpoint's tensors ({error}); "
                "install transformers>=5.24,<6"
            ) from error
        rules = list(get_model_conversion_mapping(model) if rules is None else rules)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._by_pattern = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}
        self._rename = rename_source_key
        self._prefix = model.base_model_prefix
        self._known = model.state_dict()
        self._remembered: dict[str, str] = {}

    def conversion(self, name: str) -> tuple[str, list[str]]:
        """(the parameter or buffer a tensor feeds, what the same conversion makes beside it)."""
        target, pattern = self._rename(name, self._renamings, self._converters, self._prefix, self._known)
        if target not in self._known and name in self._known:  # already a name in memory
            target, pattern = self._rename(name, [], [], self._prefix, self._known)
        first, *others = self._by_pattern[pattern].target_patterns if pattern else [target]
        return target, [target.replace(first, other) for other in others]

    def target_of(self, name: str) -> str | None:
        """The parameter or buffer that a tensor feeds or is a quantised part of; None when there is none."""
        for candidate in (name, _MODULE_PART.sub(".weight", name), _FUSED_PART.sub("", name)):
            template = EXPERT_NUMBER.sub("0", candidate)  # experts of one layer feed the same parameter
            if template not in self._remembered:
                self._remembered[template] = self.conversion(template)[0]
            if self._remembered[template] in self._known:
                return self._remembered[template]
        return None
