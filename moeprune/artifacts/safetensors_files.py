"""Tensors of safetensors files read straight from their byte ranges: what is read is resident, nothing else is.

A mapped file counts as resident memory page by page until it is closed; a model larger than memory needs to know what
it holds, so the bytes are read into the tensor they become.

The header of a safetensors file as bytes: names, dtypes, shapes, ranges. Tensor data is never interpreted here.
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from moeprune.artifacts.errors import InputError

DTYPES = {
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
    start: int  # bytes from the beginning of the file
    stop: int
    dtype: str  # as the file spells it
    shape: tuple[int, ...]

    def __getitem__(self, whole: object) -> torch.Tensor:
        assert whole is Ellipsis, "only the whole tensor can be read"
        return self.read()

    def get_dtype(self) -> str:
        return self.dtype

    def get_shape(self) -> list[int]:
        return list(self.shape)

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stop - self.start

    def read(self) -> torch.Tensor:
        """The tensor on the CPU, in its own memory."""
        data = torch.empty(self.size, dtype=torch.uint8)
        rest = memoryview(data.numpy().data)
        descriptor = os.open(self.file, os.O_RDONLY)
        try:
            position = self.start
            while rest:
                count = os.preadv(descriptor, [rest[:_READ]], position)
                if not count:
                    raise InputError(f"{self.file}: ends before byte {self.stop}; download the checkpoint again")
                rest, position = rest[count:], position + count
        finally:
            os.close(descriptor)
        return data.view(DTYPES[self.dtype]).reshape(self.shape)


def tensors_on_disk(files: Iterable[Path | str]) -> dict[str, TensorOnDisk]:
    """Name -> tensor of every tensor in the files, from their headers.

    Raises InputError for a file that is not safetensors or cut short, and a dtype that torch does not have.
    """
    found: dict[str, TensorOnDisk] = {}
    for path in map(Path, files):
        base, header = _header(path)
        for name, entry in header.items():
            start, stop = (base + offset for offset in entry["data_offsets"])
            _require_readable(path, name, entry, start, stop)
            found[name] = TensorOnDisk(path, start, stop, entry["dtype"], tuple(entry["shape"]))
    return found


def _header(path: Path) -> tuple[int, dict[str, dict]]:
    """Where the data begin, and the header without its metadata."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else size
        if length + 8 > size:
            raise InputError(f"{path}: not a safetensors file, or cut short; download the checkpoint again")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise InputError(f"{path}: the safetensors header is not JSON ({error})") from error
    header.pop("__metadata__", None)
    return 8 + length, header


def _require_readable(path: Path, name: str, entry: dict, start: int, stop: int) -> None:
    if entry["dtype"] not in DTYPES:
        raise InputError(
            f"{path}: {name} has dtype {entry['dtype']}, which torch cannot hold; known: {', '.join(DTYPES)}"
        )
    size = math.prod(entry["shape"]) * DTYPES[entry["dtype"]].itemsize
    if stop - start != size or stop > path.stat().st_size:
        raise InputError(f"{path}: {name} needs {size} bytes and has {stop - start}; download the checkpoint again")


def read_ahead(tensors: Iterable[TensorOnDisk]) -> None:
    """Ask the operating system to read the tensors into its cache; they do not count as this process's memory."""
    by_file: dict[Path, list[TensorOnDisk]] = {}
    for tensor in tensors:
        by_file.setdefault(tensor.file, []).append(tensor)
    for file, its in by_file.items():
        descriptor = os.open(file, os.O_RDONLY)
        try:
            for tensor in its:
                os.posix_fadvise(descriptor, tensor.start, tensor.size, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)


HEADER_LIMIT = 100_000_000  # bytes; the limit of the format's own reader


@dataclass(frozen=True)
class Entry:
    """One tensor of one file. `start` and `stop` count from the beginning of the FILE."""

    name: str
    dtype: str  # as the file spells it: "BF16", "F8_E4M3", "U8", ...
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stop - self.start

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def read_header(path: Path) -> tuple[list[Entry], dict[str, str]]:
    """The tensors in the order of their bytes, and the file's metadata.

    Raises InputError for a file that is cut short, has holes or overlaps, or is something else.
    """
    file_size = os.path.getsize(path)
    with path.open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0] if file_size >= 8 else HEADER_LIMIT
        if length >= HEADER_LIMIT or length + 8 > file_size:
            raise InputError(f"{path}: not a safetensors file, or cut short; download the checkpoint again")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise InputError(f"{path}: the safetensors header is not JSON ({error})") from error
    metadata = header.pop("__metadata__", None) or {}
    base = 8 + length
    entries = [
        Entry(name, value["dtype"], tuple(value["shape"]), *(base + offset for offset in value["data_offsets"]))
        for name, value in header.items()
    ]
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    _require_gapless(path, entries, base, file_size)
    return entries, metadata


def _require_gapless(path: Path, entries: Iterable[Entry], position: int, file_size: int) -> None:
    for entry in entries:
        if entry.start != position or entry.stop < entry.start:
            raise InputError(
                f"{path}: {entry.name} has bytes {entry.start}..{entry.stop}, expected to start at {position}"
            )
        position = entry.stop
    if position != file_size:
        raise InputError(
            f"{path}: has {file_size} bytes, its header describes {position}; download the checkpoint again"
        )


def header_bytes(tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the data of a file that holds the tensors (name, dtype, shape, bytes) one after another."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, dtype, shape, size in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # readers map the data in place, which wants it aligned
    return struct.pack("<Q", len(text)) + text
