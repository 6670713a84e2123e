"""Finished blocks of a walk on disk, so that a killed one goes on where it stopped, and none has to stay in memory.

block-0003-000.safetensors, ...   weights as stored and how they are quantised, a limited number of bytes a file
block-0003.json                   how many files, and the block's report; written last: with it the block is done
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import read_json, whole_file, write_json
from moeprune.data.trajectories import Sequence as TokenSequence
from moeprune.dense.methods.result import Quantised
from moeprune.dense.report import Step
from moeprune.dense.weights import Weight

FILE_BYTES = 2**28  # of one file, and so of what waits in memory to be written
_TENSORS = ("scale", "zero", "column_scale")


class Draft:
    """A block's results while they are made. Without a directory they stay in memory."""

    def __init__(self, directory: Path | None, block: int, file_bytes: int) -> None:
        self.block, self.quantised, self.files = block, dict[str, Quantised](), list[Path]()
        self._directory, self._limit = directory, file_bytes
        self._waiting: dict[str, torch.Tensor] = {}
        self._where: dict[str, Path] = {}

    def add(self, name: str, weight: torch.Tensor, quantised: Quantised | None) -> None:
        """Keep a compressed weight (out, in), in the stored dtype."""
        self._waiting[name] = weight
        if quantised is not None:
            self.quantised[name] = quantised
        if sum(tensor.nbytes for tensor in self._waiting.values()) >= self._limit:
            self.flush()

    def weight(self, name: str) -> torch.Tensor:
        if name in self._waiting:
            return self._waiting[name]
        with safe_open(self._where[name], framework="pt") as file:
            return file.get_tensor(f"{name}\nweight")

    def flush(self) -> None:
        """Write what waits in memory."""
        if self._directory is None or not self._waiting:
            return
        tensors = {f"{name}\nweight": tensor.contiguous().cpu() for name, tensor in self._waiting.items()}
        plain: dict[str, Any] = {}
        for name in self._waiting.keys() & self.quantised.keys():
            quantised = self.quantised[name]
            for part in _TENSORS:
                tensor = getattr(quantised, part)
                if tensor is not None:
                    tensors[f"{name}\n{part}"] = tensor.contiguous().cpu()
            plain[name] = [quantised.scheme, quantised.bits, quantised.group_size, quantised.symmetric]
        target = _file(self._directory, self.block, len(self.files))
        with whole_file(target) as path:
            save_file(tensors, path, metadata={"grids": json.dumps(plain, sort_keys=True)})
        self.files.append(target)
        self._where |= dict.fromkeys(self._waiting, target)
        self._waiting = {}


class Finished:
    """Blocks already compressed. None for a directory: nothing is kept."""

    def __init__(self, directory: Path | None, identity: str, *, file_bytes: int = FILE_BYTES) -> None:
        self.directory, self._file_bytes = directory, file_bytes
        self._where: dict[str, Path] = {}  # weight -> its file, of the blocks that were committed or recalled
        self._quantised: dict[str, Quantised] = {}  # without a directory
        if directory is None:
            return
        mark = directory / "identity"
        if not mark.is_file() or mark.read_text() != identity:  # of another model, data set or configuration
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
            mark.write_text(identity)

    def draft(self, block: int) -> Draft:
        return Draft(self.directory, block, self._file_bytes)

    def commit(self, draft: Draft, steps: Sequence[Step], warnings: list[str]) -> None:
        if self.directory is None:
            self._quantised |= draft.quantised
            return
        draft.flush()
        notes = {"files": len(draft.files), "stages": [asdict(step) for step in steps], "warnings": warnings}
        write_json(self._notes(draft.block), notes)
        self._index(draft.files)

    def recall(self, block: int) -> tuple[list[Step], list[str]] | None:
        """The report and warnings of a finished block, or None when it is not; then its weights can be read, too."""
        if self.directory is None or not self._notes(block).is_file():
            return None
        try:
            notes = read_json(self._notes(block))
            self._index(_file(self.directory, block, number) for number in range(notes["files"]))
        except (SafetensorError, OSError, InputError):  # torn by a full disk: as if it were not there
            return None
        steps = [replace(Step(**row), shape=tuple(row["shape"])) for row in notes["stages"]]
        return steps, notes["warnings"]

    def put_back(self, weights: Iterable[Weight]) -> None:
        """Write finished weights into the model, where it is in memory."""
        for weight in weights:
            if not weight.parameter.is_meta:
                weight.write(self.weight(weight.name))

    def weight(self, name: str) -> torch.Tensor:
        """A finished weight (out, in), in the stored dtype."""
        with safe_open(self._where[name], framework="pt") as file:
            return file.get_tensor(f"{name}\nweight")

    def quantised(self, name: str) -> Quantised | None:
        """How a finished weight is quantised; None: not at all."""
        if self.directory is None:
            return self._quantised.get(name)
        with safe_open(self._where[name], framework="pt") as file:
            plain = json.loads(file.metadata()["grids"]).get(name)
            if plain is None:
                return None
            keys = set(file.keys())
            parts = {part: file.get_tensor(f"{name}\n{part}") for part in _TENSORS if f"{name}\n{part}" in keys}
        return Quantised(*plain, **parts)

    def _index(self, files: Iterable[Path]) -> None:
        for path in files:
            with safe_open(path, framework="pt") as file:
                self._where |= {key.partition("\n")[0]: path for key in file.keys()}  # noqa: SIM118 (not a dict)

    def _notes(self, block: int) -> Path:
        assert self.directory is not None
        return self.directory / f"block-{block:04}.json"


def _file(directory: Path, block: int, number: int) -> Path:
    return directory / f"block-{block:04}-{number:03}.safetensors"


class Lazily(Mapping[str, Any]):
    """A mapping whose values are read when they are asked for, one at a time."""

    def __init__(self, names: Iterable[str], read: Any) -> None:
        self._names, self._read = dict.fromkeys(names), read

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def identity_of(model: Iterable[str], methods: Iterable[str], sequences: Iterable[TokenSequence], batches: Any) -> str:
    """16 hex digits of everything that decides a walk's result; `model` says which weights it starts from."""
    digest = hashlib.sha256(json.dumps([list(methods), batches, "dense/2"]).encode())
    for line in model:
        digest.update(line.encode() + b"\n")
    for sequence in sequences:
        digest.update(sequence.trajectory.encode() + sequence.ids.tobytes() + sequence.counted.tobytes())
    return digest.hexdigest()[:16]


def identity_of_weights(weights: Iterable[Weight]) -> Iterator[str]:
    """A line for each weight in memory: name, shape, dtype and sums."""
    for weight in weights:
        stored = weight.parameter.detach() if weight.expert is None else weight.parameter.detach()[weight.expert]
        sums = [float(stored.sum(dtype=torch.float64)), float(stored.square().sum(dtype=torch.float64))]
        yield f"{weight.name}:{weight.shape}:{weight.dtype}:{np.array(sums).tobytes().hex()}"


def identity_of_files(files: Iterable[Path]) -> Iterator[str]:
    """A line for each file of a checkpoint: path, size and time."""
    for path in files:
        status = path.stat()
        yield f"{path}:{status.st_size}:{status.st_mtime_ns}"
