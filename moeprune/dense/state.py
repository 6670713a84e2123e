"""Finished blocks of a walk on disk, so that a killed one goes on where it stopped."""

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from moeprune.artifacts.files import whole_file
from moeprune.data.trajectories import Sequence as TokenSequence
from moeprune.dense.report import Stage
from moeprune.dense.result import Grid
from moeprune.dense.weights import Weight

_TENSORS = ("scale", "zero", "column_scale")


class Finished:
    """Blocks already compressed: weights as stored, the grids behind them, the report. None: nothing is kept."""

    def __init__(self, directory: Path | None, identity: str) -> None:
        self.directory = directory
        if directory is None:
            return
        mark = directory / "identity"
        if not mark.is_file() or mark.read_text() != identity:  # of another model, data set or configuration
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
            mark.write_text(identity)

    def commit(
        self,
        block: int,
        weights: Mapping[str, torch.Tensor],
        grids: Mapping[str, Grid],
        stages: Sequence[Stage],
        told: list[str],
    ) -> None:
        if self.directory is None:
            return
        tensors = {f"{name}\nweight": tensor.contiguous().cpu() for name, tensor in weights.items()}
        plain: dict[str, Any] = {}
        for name, grid in grids.items():
            for part in _TENSORS:
                tensor = getattr(grid, part)
                if tensor is not None:
                    tensors[f"{name}\n{part}"] = tensor.contiguous().cpu()
            plain[name] = [grid.scheme, grid.bits, grid.group_size, grid.symmetric]
        notes = {"grids": plain, "stages": [asdict(stage) for stage in stages], "warnings": told}
        with whole_file(self._file(block)) as path:
            save_file(tensors, path, metadata={"block": json.dumps(notes)})

    def restore(
        self, block: int, weights: Mapping[str, Weight]
    ) -> tuple[dict[str, Grid], list[Stage], list[str]] | None:
        """Write a finished block's weights into the model; its grids, report and warnings, or None when it is not."""
        if self.directory is None or not self._file(block).is_file():
            return None
        try:
            with safe_open(self._file(block), framework="pt") as file:
                notes = json.loads(file.metadata()["block"])
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
        except (SafetensorError, json.JSONDecodeError, KeyError):  # torn by a full disk: as if it were not there
            return None
        grids = {}
        for name, (scheme, bits, group_size, symmetric) in notes["grids"].items():
            parts = {part: tensors.get(f"{name}\n{part}") for part in _TENSORS}
            scale = parts.pop("scale")
            assert scale is not None
            grids[name] = Grid(scheme, bits, group_size, symmetric, scale, **parts)
        for key, tensor in tensors.items():
            name, _, part = key.partition("\n")
            if part == "weight":
                weights[name].write(tensor)
        stages = [replace(Stage(**row), shape=tuple(row["shape"])) for row in notes["stages"]]
        return grids, stages, notes["warnings"]

    def _file(self, block: int) -> Path:
        assert self.directory is not None
        return self.directory / f"block-{block:04}.safetensors"


def identity_of(
    weights: Iterable[Weight], methods: Iterable[str], sequences: Iterable[TokenSequence], batches: Any
) -> str:
    """16 hex digits of everything that decides a walk's result."""
    digest = hashlib.sha256(json.dumps([list(methods), batches, "dense/1"]).encode())
    for weight in weights:
        stored = weight.parameter.detach() if weight.expert is None else weight.parameter.detach()[weight.expert]
        digest.update(f"{weight.name}:{weight.shape}:{weight.dtype}".encode())
        digest.update(np.float64(float(stored.sum(dtype=torch.float64))).tobytes())
        digest.update(np.float64(float(stored.square().sum(dtype=torch.float64))).tobytes())
    for sequence in sequences:
        digest.update(sequence.trajectory.encode() + sequence.ids.tobytes() + sequence.counted.tobytes())
    return digest.hexdigest()[:16]
