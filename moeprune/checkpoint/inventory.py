"""Every tensor of a checkpoint: where its bytes are, what it feeds in memory, and what pruning must do with it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import read_json
from moeprune.artifacts.statistics import Layer
from moeprune.checkpoint.headers import Entry, read_header
from moeprune.checkpoint.memory_names import MemoryModel
from moeprune.checkpoint.tensors import Tensor, classified
from moeprune.checkpoint.understood import require_plain_experts, require_understood
from moeprune.checkpoint.weight_files import (
    INDEX,
    SINGLE,
    quantization_method,
    require_index_fits,
    require_known_quantization,
    weight_files,
)

__all__ = [
    "INDEX",
    "SINGLE",
    "Inventory",
    "Tensor",
    "checkpoint_fingerprint",
    "inventory",
    "read_floats",
    "router_tensor",
]


@dataclass(frozen=True)
class Inventory:
    """A checkpoint directory, read from headers alone."""

    directory: Path
    config_text: str
    config: Mapping[str, Any]
    memory: MemoryModel
    tensors: tuple[Tensor, ...]  # shard by shard, in the order of their bytes
    metadata: Mapping[str, Mapping[str, str]]  # shard -> its header's metadata
    index: Mapping[str, Any] | None  # None for a single file
    warnings: tuple[str, ...] = ()
    by_name: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self.memory.layers

    @property
    def shards(self) -> tuple[str, ...]:
        return tuple(self.metadata)

    @property
    def quantization(self) -> str | None:
        """The quantisation method of the source, None for plain weights."""
        return quantization_method(self.directory, self.config)

    @property
    def packed(self) -> str | None:
        """The method that packed more than experts, None where all else is plain: MXFP4 holds experts alone."""
        method = self.quantization
        return None if method is None or method.lower() == "mxfp4" else method

    @property
    def mtp(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.role == "mtp")


def inventory(directory: Path) -> Inventory:
    """The checkpoint's tensors with their roles, from config.json and the safetensors headers; no weight is read.

    Raises InputError for a checkpoint that is incomplete, inconsistent or not safetensors, for a family or quantisation
    that is not supported, and for a tensor that may depend on the number of experts and is not understood.
    """
    directory = Path(directory)
    config = read_json(directory / "config.json")
    require_known_quantization(directory, quantization_method(directory, config))
    files, index = weight_files(directory)
    metadata: dict[str, Mapping[str, str]] = {}
    entries: list[tuple[str, Entry]] = []
    for file in files:
        shard, metadata[file] = read_header(directory / file)
        entries += [(file, entry) for entry in shard]
    require_index_fits(directory, index, entries)
    memory = MemoryModel(directory, config)
    tensors = tuple(classified(memory, file, entry) for file, entry in entries)
    require_understood(directory, memory, tensors)
    if quantization_method(directory, config) is None:
        require_plain_experts(tensors)
    text = (directory / "config.json").read_bytes().decode("utf-8")
    by_name = {tensor.name: tensor for tensor in tensors}
    return Inventory(directory, text, config, memory, tensors, metadata, index, _version_warnings(), by_name)


def checkpoint_fingerprint(checkpoint: Inventory) -> str:
    """The fingerprint of the model on disk; equals models.layers.model_fingerprint of the loaded model."""
    from moeprune.models.layers import fingerprint

    tensors = [router_tensor(checkpoint, layer.name) for layer in checkpoint.layers]
    weights = (read_floats(checkpoint.directory / tensor.shard, tensor.entry) for tensor in tensors)
    return fingerprint(checkpoint.memory.model_type, checkpoint.layers, weights)


def router_tensor(checkpoint: Inventory, layer: str) -> Tensor:
    """The tensor on disk that is a layer's router projection (experts, hidden)."""
    target = checkpoint.memory.router_weights[layer]
    sources = [tensor for tensor in checkpoint.tensors if tensor.target == target]
    shape = checkpoint.memory.shapes[target]
    if len(sources) != 1 or sources[0].entry.shape != shape:
        names = ", ".join(f"{tensor.name} {list(tensor.entry.shape)}" for tensor in sources)
        raise InputError(f"{layer}: expected one router weight of shape {list(shape)} on disk, found {names or 'none'}")
    return sources[0]


def read_floats(path: Path, entry: Entry) -> np.ndarray:
    """A tensor of plain floating-point numbers as float32, in its shape."""
    with path.open("rb") as file:
        file.seek(entry.start)
        data = file.read(entry.size)
    return as_float32(data, entry.dtype, place=entry.name).reshape(entry.shape)


def as_float32(data: bytes, dtype: str, *, place: str) -> np.ndarray:
    """The numbers behind plain floating-point bytes, flat."""
    if dtype == "BF16":  # the upper half of a float32
        return (np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    plain = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}
    if dtype not in plain:
        raise InputError(f"{place}: the router is stored as {dtype}; a router that is quantised cannot be read or cut")
    return np.frombuffer(data, dtype=plain[dtype]).astype(np.float32)


def _version_warnings() -> tuple[str, ...]:
    import transformers

    from moeprune.models.families import VERIFIED_WITH

    if transformers.__version__.startswith(VERIFIED_WITH + "."):
        return ()
    return (
        f"transformers {transformers.__version__} is installed; families were verified with {VERIFIED_WITH}: `moeprune "
        "families` lists them, and the recording's own checks hold for any version",
    )
