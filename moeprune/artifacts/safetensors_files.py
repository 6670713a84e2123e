"""The header of a safetensors file as bytes: names, dtypes, shapes, ranges. Tensor data is never interpreted here.

huggingface_hub reads headers too, but neither limits their size nor refuses holes, overlaps and files cut short.
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from moeprune.artifacts.errors import InputError

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
