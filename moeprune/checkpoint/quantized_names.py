"""Module names inside quantisation settings: those that name an expert by number follow it."""

import re
from collections.abc import Callable, Mapping, Sequence

from moeprune.artifacts.errors import InputError
from moeprune.checkpoint.inventory import Inventory
from moeprune.checkpoint.memory_names import EXPERT_NUMBER

_NUMBER = re.compile(r"(?<=\bexperts\.)\d+(?=\.|$)")
_NUMBER_IN_PATTERN = re.compile(r"\bexperts\\?\.\d+")


def module_renamer(checkpoint: Inventory, orders: Mapping[str, Sequence[int]]) -> Callable[[str], str | None]:
    """A function from a module's name or pattern to the one that means the same modules after the edit, None for none.

    It raises InputError for an expert's number in a regular expression, and for one in a block that is not known.
    """
    layers = _layers_by_prefix(checkpoint)
    numbers = {
        layer: {str(old): str(new) for new, old in enumerate([*order, *checkpoint.memory.extra_ids(layer)])}
        for layer, order in orders.items()
    }
    mtp = [tensor.name for tensor in checkpoint.mtp]

    def renamed(name: str) -> str | None:
        match = _NUMBER.search(name)
        if match is None and _NUMBER_IN_PATTERN.search(name) is None:
            return name
        layer = layers.get(name[: match.start()]) if match is not None else None
        if match is not None and layer is not None:
            number = numbers[layer].get(match.group())
            return None if number is None else name[: match.start()] + number + name[match.end() :]
        if match is not None and any(tensor.startswith(name[: match.start()]) for tensor in mtp):
            return None
        raise InputError(
            f"quantization_config names {name!r}, an expert by its number, and whose is not clear; it cannot be "
            "renumbered. Spell out the module names"
        )

    return renamed


def _layers_by_prefix(checkpoint: Inventory) -> dict[str, str]:
    """What the names of a layer's experts begin with, on disk and in memory -> the layer."""
    prefixes = {f"{layer.name}.experts.": layer.name for layer in checkpoint.layers}
    for tensor in checkpoint.tensors:
        if tensor.role == "expert":
            match = EXPERT_NUMBER.search(tensor.name)
            assert match is not None
            assert tensor.layer is not None
            prefixes[tensor.name[: match.start()]] = tensor.layer
    return prefixes
