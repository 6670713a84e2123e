"""The tensors of a suspended forward pass, on disk while it waits.

Where many forward passes stand between two decoder layers, on disk, so that another process can go on from there.
"""

import ctypes
import json
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

SMALL = 2**14  # bytes that are not worth a file


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a value made of tuples, lists, mappings and dataclasses, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for child in value.values():
            yield from tensors_in(child)
    elif isinstance(value, tuple | list):
        for child in value:
            yield from tensors_in(child)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


@dataclass
class _File:
    path: Path
    tensor: "weakref.ref[torch.Tensor]"
    version: int  # of the tensor when it was written

    def holds(self, tensor: torch.Tensor) -> bool:
        return self.tensor() is tensor and self.version == tensor._version


class Parked:
    """What one forward pass holds while it waits: put away on disk, brought back before it goes on.

    A tensor keeps its identity: its memory is emptied and filled again, so everything that refers to it, whoever that
    is, sees what it saw. Tensors that were seen once are followed until nobody holds them any more.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._directory, self._name = directory, name
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}
        self._files: dict[int, _File] = {}
        self._away: list[tuple[torch.Tensor, int, Path]] = []
        self._number = 0

    def follow(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            for one in (tensor, tensor._base):
                if one is not None:
                    self._seen[id(one)] = weakref.ref(one)

    def held(self, shared: set[int]) -> list[torch.Tensor]:
        """One tensor for each piece of memory that is followed and alive, without those at the addresses `shared`."""
        self._seen = {key: reference for key, reference in self._seen.items() if reference() is not None}
        pieces: dict[int, torch.Tensor] = {}
        for tensor in (reference() for reference in self._seen.values()):
            if tensor is not None:
                storage = tensor.untyped_storage()
                if storage.resizable() and storage.nbytes() >= SMALL and storage.data_ptr() not in shared:
                    pieces.setdefault(storage.data_ptr(), tensor)
        return list(pieces.values())

    def put_away(self, tensors: list[torch.Tensor]) -> None:
        """Write the tensors that changed since they were last written, and empty the memory of all."""
        assert not self._away
        kept = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            file = self._files.get(id(tensor))
            if file is None or not file.holds(tensor):
                file = self._write(tensor)
            kept[id(tensor)] = file
            self._away.append((tensor, storage.nbytes(), file.path))
        for file in self._files.values():
            if file not in kept.values():
                file.path.unlink(missing_ok=True)
        self._files = kept
        for tensor, _, _ in self._away:
            tensor.untyped_storage().resize_(0)

    def bring_back(self) -> None:
        """Fill the memory of everything that was put away."""
        for tensor, size, path in self._away:
            _fill(tensor, size, path)
        self._away = []

    def close(self) -> None:
        """Remove the files, after the pass has ended; what somebody outside of it holds is filled first."""
        away = [(weakref.ref(tensor), size, path) for tensor, size, path in self._away]
        self._away = []
        for reference, size, path in away:
            tensor = reference()
            if tensor is not None:
                _fill(tensor, size, path)
        for file in self._files.values():
            file.path.unlink(missing_ok=True)

    def _write(self, tensor: torch.Tensor) -> _File:
        path = self._directory / f"{self._name}-{self._number}.bin"
        self._number += 1
        data = _as_bytes(tensor).cpu() if tensor.is_cuda else tensor
        path.write_bytes(_view(data))
        return _File(path, weakref.ref(tensor), tensor._version)


def _fill(tensor: torch.Tensor, size: int, path: Path) -> None:
    tensor.untyped_storage().resize_(size)
    data = torch.empty(size, dtype=torch.uint8) if tensor.is_cuda else tensor
    rest = _view(data)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(rest):
            rest = rest[count:]
    assert not rest, f"{path} was cut short"
    if tensor.is_cuda:
        _as_bytes(tensor).copy_(data)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole memory behind a tensor as uint8."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _view(tensor: torch.Tensor) -> memoryview:
    """The whole memory behind a tensor on the CPU. By address, because numpy's view would forbid to empty it."""
    storage = tensor.untyped_storage()
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


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
