"""Models spread over devices by accelerate: where a module computes, and weights that wait in memory or on disk.

A module that waits elsewhere has parameters without numbers, and a hook that brings them before its forward and takes
them away after it. So a weight is read with `value`, and cut by cutting what its hook brings.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moeprune.artifacts.errors import InputError
from moeprune.models.options import DeviceMap


def require_device_map(device_map: DeviceMap, offload_folder: str | None) -> None:
    """Raises InputError for a device that is not there, and for weights on disk without a folder."""
    places = device_map.values() if isinstance(device_map, dict) else ()
    if not isinstance(device_map, str) and not places:
        raise InputError("runtime.device_map: names no module; give auto, or a device for every module ('': 0)")
    for place in places:
        device = f"cuda:{place}" if isinstance(place, int) else place
        if device == "disk":
            continue
        try:
            target = torch.device(device)
        except RuntimeError as error:
            raise InputError(f"runtime.device_map: {place!r} is no device; give 0, cuda:1, cpu or disk") from error
        if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
            raise InputError(f"runtime.device_map: torch sees {torch.cuda.device_count()} GPUs, not {place!r}")
    if "disk" in places and offload_folder is None:
        raise InputError(
            "runtime.device_map: puts modules on disk; give runtime.offload_folder, which takes a copy of their weights"
        )
    if offload_folder is not None and Path(offload_folder).exists() and not Path(offload_folder).is_dir():
        raise InputError(f"runtime.offload_folder: {offload_folder} is a file; give a directory")


def resolved(model: nn.Module, device_map: Mapping[str, int | str]) -> dict[str, int | str]:
    """A map that says the same with names that do not lie in one another; '' in `device_map` stands for all others.

    Raises InputError for names that are no modules, for weights that no name covers and for tied ones that are parted.
    """
    known = {name for name, _ in model.named_modules()} | {name for name, _ in model.named_parameters()}
    for name in device_map:
        if name not in known:
            raise InputError(f"runtime.device_map: the model has no module {name!r}; `moeprune inspect` shows names")
    places = dict(_places(model, "", device_map, device_map.get("")))
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if _place_of(name, places) != _place_of(other, places):
            raise InputError(
                f"runtime.device_map: {other} and {name} are one tensor and have two places; give both the same one"
            )
    return places


def _place_of(parameter: str, places: Mapping[str, int | str]) -> int | str:
    parts = parameter.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), -1, -1))
    return next(places[name] for name in names if name in places)


def _places(
    module: nn.Module, name: str, device_map: Mapping[str, int | str], place: int | str | None
) -> Iterator[tuple[str, int | str]]:
    """(name, place) of the largest parts of the module that go to one place each; its own is `place`."""
    start = f"{name}." if name else ""
    if not any(key.startswith(start) and key != name for key in device_map):
        if place is not None:
            yield name, place
        elif any(True for _ in module.parameters()):
            raise InputError(f"runtime.device_map: gives no device for {name}; name it, or '' for all others")
        return
    for key, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        own = device_map.get(start + key, place)
        if own is None:
            raise InputError(f"runtime.device_map: gives no device for {start}{key}; name it, or '' for all others")
        yield start + key, own
    for key, child in module.named_children():
        yield from _places(child, start + key, device_map, device_map.get(start + key, place))


def device_of_inputs(model: Any) -> torch.device:
    """Where a batch goes before the model is called with it."""
    hook = _hook(model)
    device = getattr(hook, "execution_device", None) if hook is not None else None
    return torch.device(_name(device)) if device is not None else model.device


def device_of_module(module: nn.Module, otherwise: torch.device) -> torch.device:
    """Where a module computes."""
    for part in module.modules():
        device = getattr(_hook(part), "execution_device", None)
        if device is not None and any(True for _ in part.parameters(recurse=False)):
            return torch.device(_name(device))
    parameter = next(module.parameters(), None)
    return otherwise if parameter is None or parameter.is_meta else parameter.device


def is_away(module: nn.Module) -> bool:
    """Whether weights of the module are brought for every call."""
    return any(getattr(_hook(part), "offload", False) for part in module.modules())


def value(module: nn.Module, name: str) -> torch.Tensor:
    """The module's own parameter or buffer, with its numbers."""
    tensor: torch.Tensor = getattr(module, name)
    weights = getattr(_hook(module), "weights_map", None)
    return weights[name] if tensor.is_meta and weights is not None else tensor


def owned(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """(module, name, parameter) of a module and all below it."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            yield part, name, parameter


def waiting_weights(module: nn.Module) -> tuple[dict[str, Any], Any] | None:
    """(attributes of the module's hook, what it brings) where its weights wait elsewhere; None where they are here."""
    hook = _hook(module)
    weights = getattr(hook, "weights_map", None)
    return None if weights is None or not getattr(hook, "offload", False) else (hook.__dict__, weights)


class Changed(Mapping[str, torch.Tensor]):
    """What a hook brings, changed on the way."""

    def __init__(
        self, weights: Mapping[str, torch.Tensor], change: Callable[[str, torch.Tensor], torch.Tensor]
    ) -> None:
        self._weights, self._change = weights, change

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._change(name, self._weights[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def align_waiting(model: nn.Module, alignment: int) -> None:
    """Let hooks bring weights at addresses that are multiples of `alignment`, as weights that stay are."""

    def aligned(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if tensor.data_ptr() % alignment else tensor

    for module in model.modules():
        waiting = waiting_weights(module)
        if waiting is not None:
            waiting[0]["weights_map"] = Changed(waiting[1], aligned)


def _hook(module: nn.Module) -> Any:
    """accelerate's hook of the module that knows its device; hooks may come in chains."""
    hook = getattr(module, "_hf_hook", None)
    return next((one for one in getattr(hook, "hooks", (hook,)) if hasattr(one, "execution_device")), None)


def _name(device: Any) -> str:
    return f"cuda:{device}" if isinstance(device, int) else str(device)
