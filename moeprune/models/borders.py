"""Where many forward passes stand between two decoder layers, on disk, so that another process can go on from there."""

import json
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

# What a layer gave, without its numbers: {"shape", "dtype"} for a tensor, {"tuple" | "list" | "dict": ...}, or null.
Outline = dict[str, Any] | None


class NotResumable(RuntimeError):
    """What a model keeps between two layers is not all in what the next layer is called with."""


class Border:
    """The passes before the decoder layer at `position`, as `write` left them in `directory`."""

    def __init__(self, directory: Path, position: int) -> None:
        self.directory, self.position = directory, position

    def _file(self, number: int) -> Path:
        return self.directory / f"pass-{number:05d}.safetensors"

    def write(self, number: int, tensors: Sequence[torch.Tensor], outlines: Sequence[Outline]) -> None:
        """Keep what the pass `number` calls its next layer with, and the outlines of what all layers before it gave."""
        self.directory.mkdir(parents=True, exist_ok=True)
        named = {str(n): tensor.detach().cpu().contiguous().clone() for n, tensor in enumerate(tensors)}
        save_file(named, self._file(number), metadata={"outlines": json.dumps(list(outlines))})

    def outlines(self, number: int) -> list[Outline]:
        with safe_open(self._file(number), framework="pt") as file:
            return list(json.loads(file.metadata()["outlines"]))

    def refill(self, number: int, tensors: Sequence[torch.Tensor]) -> None:
        """Put the numbers that were kept into the tensors that this process calls the next layer with.

        Raises NotResumable when the call does not have the same tensors.
        """
        with safe_open(self._file(number), framework="pt") as file:
            kept = [file.get_tensor(str(n)) for n in range(len(file.keys()))]
        if [(t.shape, t.dtype) for t in kept] != [(t.shape, t.dtype) for t in tensors]:
            raise NotResumable("the call of the next layer does not have the tensors that were kept")
        for tensor, numbers in zip(tensors, kept):
            if not torch.equal(tensor.cpu(), numbers):
                tensor.copy_(numbers)


def outline(value: Any) -> Outline:
    """What `value` looks like. Raises NotResumable unless it is made of tensors, tuples, lists and mappings."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if type(value) in (tuple, list):
        return {type(value).__name__: [outline(child) for child in value]}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": {key: outline(child) for key, child in value.items()}}
    raise NotResumable(f"a decoder layer gives a {type(value).__name__}")


def blank(outlined: Outline, device: torch.device) -> Any:
    """Zeros that look like what was outlined."""
    if outlined is None:
        return None
    if "shape" in outlined:
        return torch.zeros(outlined["shape"], dtype=getattr(torch, outlined["dtype"]), device=device)
    if "dict" in outlined:
        return {key: blank(child, device) for key, child in outlined["dict"].items()}
    (kind, children), *_ = outlined.items()
    return {"tuple": tuple, "list": list}[kind](blank(child, device) for child in children)


def left_behind(outputs: Sequence["weakref.ref[torch.Tensor]"], tensors: Sequence[torch.Tensor]) -> bool:
    """Whether something that a layer gave is still held and is not in what the next layer is called with."""
    known = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    alive = (reference() for reference in outputs)
    return any(tensor is not None and tensor.untyped_storage().data_ptr() not in known for tensor in alive)
