"""Tensors of safetensors files read straight from their byte ranges: what is read is resident, nothing else is.

A mapped file counts as resident memory page by page until it is closed; a model larger than memory needs to know what
it holds, so the bytes are read into the tensor they become.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.safetensors_files import Entry, read_header

DTYPES = {  # as a file spells them
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_READ = 2**30  # bytes a call of the operating system is asked for; Linux gives at most 2 GiB


@dataclass(frozen=True)
class TensorOnDisk:
    """One tensor of a file, read when it is indexed with `...`, as transformers' loading does."""

    file: Path
    entry: Entry

    def __getitem__(self, whole: object) -> torch.Tensor:
        assert whole is Ellipsis, "only the whole tensor can be read"
        return self.read()

    def get_dtype(self) -> str:
        return self.entry.dtype

    def get_shape(self) -> list[int]:
        return list(self.entry.shape)

    @property
    def size(self) -> int:
        """Bytes."""
        return self.entry.size

    def read(self) -> torch.Tensor:
        """The tensor on the CPU, in its own memory."""
        data = torch.empty(self.size, dtype=torch.uint8)
        rest = memoryview(data.numpy().data)
        descriptor = os.open(self.file, os.O_RDONLY)
        try:
            position = self.entry.start
            while rest:
                count = os.preadv(descriptor, [rest[:_READ]], position)
                if not count:
                    raise InputError(f"{self.file}: ends before byte {self.entry.stop}; download the checkpoint again")
                rest, position = rest[count:], position + count
        finally:
            os.close(descriptor)
        return data.view(DTYPES[self.entry.dtype]).reshape(self.entry.shape)


def tensors_on_disk(files: Iterable[Path | str]) -> dict[str, TensorOnDisk]:
    """Name -> tensor of every tensor in the files, from their headers.

    Raises InputError for a file that is not safetensors or cut short, and a dtype that torch does not have.
    """
    tensors: dict[str, TensorOnDisk] = {}
    for path in map(Path, files):
        for entry in read_header(path)[0]:
            _require_readable(path, entry)
            tensors[entry.name] = TensorOnDisk(path, entry)
    return tensors


def _require_readable(path: Path, entry: Entry) -> None:
    if entry.dtype not in DTYPES:
        raise InputError(
            f"{path}: {entry.name} has dtype {entry.dtype}, which torch cannot hold; known: {', '.join(DTYPES)}"
        )
    size = entry.elements * DTYPES[entry.dtype].itemsize
    if entry.size != size:
        raise InputError(f"{path}: {entry.name} needs {size} bytes and has {entry.size}; download the checkpoint again")


def read_ahead(tensors: Iterable[TensorOnDisk]) -> None:
    """Ask the operating system to read the tensors into its cache; they do not count as this process's memory."""
    by_file: dict[Path, list[TensorOnDisk]] = {}
    for tensor in tensors:
        by_file.setdefault(tensor.file, []).append(tensor)
    for file, read in by_file.items():
        descriptor = os.open(file, os.O_RDONLY)
        try:
            for tensor in read:
                os.posix_fadvise(descriptor, tensor.entry.start, tensor.size, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)
