"""Every tensor of a checkpoint: in which file, where its bytes are, what it feeds in memory, how pruning treats it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import read_json
from moeprune.artifacts.safetensors_files import Entry, read_header
from moeprune.artifacts.statistics import Layer
from moeprune.checkpoint.config_json import QUANTIZATION_KEYS, text_sections
from moeprune.checkpoint.names import MemoryModel
from moeprune.checkpoint.tensors import Tensor, classified, require_plain_experts, require_understood

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Formats whose companions keep whole experts apart, by name or by the first axis, so that experts can be cut exactly.
QUANTIZER_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
QUANTIZATION = ("fp8", "mxfp4", "compressed-tensors", "gptq", "awq", "modelopt", "auto-round", "fbgemm_fp8")


def quantization_method(directory: Path, config: Mapping[str, Any]) -> str | None:
    """What the weights were quantised with, by config.json or a quantiser's own file beside it; None: plain ones."""
    for _, section in text_sections(config):
        for key in QUANTIZATION_KEYS:
            if section.get(key):
                return str(section[key].get("quant_method") or section[key].get("quant_algo") or "an unnamed method")
    return next((method for file, method in QUANTIZER_FILES.items() if (directory / file).is_file()), None)


def require_known_quantization(directory: Path, method: str | None) -> None:
    if method is not None and method.lower() not in QUANTIZATION:
        raise InputError(
            f"{directory}: quantised with {method}, whose tensors may not be cut by expert; supported: "
            f"{', '.join(QUANTIZATION)}. Prune the unquantised checkpoint and quantise the result"
        )


def weight_files(directory: Path) -> tuple[list[str], Mapping[str, Any] | None]:
    """Names of the safetensors files that make up the model, and the index when there is one."""
    if (directory / INDEX).is_file():
        if (directory / SINGLE).is_file() and SINGLE not in (directory / INDEX).read_text(encoding="utf-8"):
            raise InputError(
                f"{directory}: has both {SINGLE} and {INDEX}, and which is the model is not clear; remove one"
            )
        index = read_json(directory / INDEX)
        if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict) or not index["weight_map"]:
            raise InputError(f"{directory / INDEX}: has no weight_map; download the checkpoint again")
        files = sorted(set(index["weight_map"].values()))
        missing = [file for file in files if not (directory / file).is_file()]
        if missing:
            raise InputError(
                f"{directory}: {missing[0]} is named in {INDEX} but is not there; download the checkpoint again"
            )
        return files, index
    if (directory / SINGLE).is_file():
        return [SINGLE], None
    others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in directory.glob(pattern))
    if others:
        raise InputError(
            f"{directory}: the weights are in {others[0]}, not in safetensors; convert them first, for example with "
            "transformers' save_pretrained"
        )
    raise InputError(f"{directory}: neither {SINGLE} nor {INDEX}; give the directory of a checkpoint")


def require_index_fits(directory: Path, index: Mapping[str, Any] | None, entries: list[tuple[str, Entry]]) -> None:
    file_of: dict[str, str] = {}
    for file, entry in entries:
        if entry.name in file_of:
            raise InputError(f"{directory}: {entry.name} is in {file_of[entry.name]} and again in {file}")
        file_of[entry.name] = file
    if index is None:
        return
    weight_map = index["weight_map"]
    for name in file_of.keys() | weight_map.keys():
        if file_of.get(name) != weight_map.get(name):
            raise InputError(
                f"{directory}: {name} is in {file_of.get(name, 'no file')}, but {INDEX} says "
                f"{weight_map.get(name, 'nothing')}"
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
    def elements(self) -> int:
        """Numbers in all tensors; one of quantised weights may hold several."""
        return sum(tensor.entry.elements for tensor in self.tensors)

    @property
    def tensor_bytes(self) -> int:
        return sum(tensor.entry.size for tensor in self.tensors)

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
