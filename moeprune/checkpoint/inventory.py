"""Every tensor of a checkpoint: where its bytes are, what it feeds in memory, and what pruning must do with it."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import read_json
from moeprune.artifacts.statistics import Layer
from moeprune.checkpoint.headers import Entry, read_header
from moeprune.checkpoint.memory_names import MemoryModel, expert_number
from moeprune.checkpoint.model_config import QUANTIZATION_KEYS, text_sections

# expert: one expert's own tensor; fused: all experts of a layer in one; router: anything that scores experts;
# mtp: a multi-token-prediction layer; other: everything else, copied as it is
Role = Literal["expert", "fused", "router", "mtp", "other"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Formats whose companions keep whole experts apart, by name or by the first axis, so that experts can be cut exactly.
QUANTIZATION = ("fp8", "mxfp4", "compressed-tensors", "gptq", "awq", "modelopt", "auto-round", "fbgemm_fp8")
_MTP_NAME = re.compile(r"(?:^|\.)(?:mtp|nextn|mtp_\w+)(?:\.|$)")


@dataclass(frozen=True)
class Tensor:
    """One tensor of the checkpoint and what it is."""

    entry: Entry
    shard: str  # file name
    target: str | None  # parameter or buffer in memory that it feeds; None when transformers does not load it
    role: Role = "other"
    layer: str | None = None  # module path of the MoE block
    expert: int | None = None  # only of role expert
    axis: int | None = None  # on disk, runs over experts; only of roles fused and router
    extra: int = 0  # rows after the experts' that belong to none

    @property
    def name(self) -> str:
        return self.entry.name


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
        section = quantization_section(self.config)
        return None if section is None else str(section.get("quant_method") or section.get("quant_algo") or "unknown")

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
    _require_known_quantization(directory, config)
    files, index = _weight_files(directory)
    metadata: dict[str, Mapping[str, str]] = {}
    entries: list[tuple[str, Entry]] = []
    for file in files:
        shard, metadata[file] = read_header(directory / file)
        entries += [(file, entry) for entry in shard]
    _require_index_fits(directory, index, entries)
    memory = MemoryModel(directory, config)
    tensors = tuple(_classified(memory, file, entry) for file, entry in entries)
    _require_complete(directory, memory, tensors)
    _require_understood_blocks(memory, tensors)
    _require_no_tables_of_experts(memory, tensors)
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


def quantization_section(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The `quantization_config` of the model or of its text part."""
    found = [section[key] for _, section in text_sections(config) for key in QUANTIZATION_KEYS if section.get(key)]
    return found[0] if found else None


def _require_known_quantization(directory: Path, config: Mapping[str, Any]) -> None:
    section = quantization_section(config)
    if section is None:
        return
    method = str(section.get("quant_method") or section.get("quant_algo") or "")
    if method.lower() not in QUANTIZATION:
        raise InputError(
            f"{directory}: quantised with {method or 'an unnamed method'}, whose tensors may not be cut by expert; "
            f"supported: {', '.join(QUANTIZATION)}. Prune the unquantised checkpoint and quantise the result"
        )


def _weight_files(directory: Path) -> tuple[list[str], Mapping[str, Any] | None]:
    """Names of the safetensors files that make up the model, and the index when there is one."""
    if (directory / INDEX).is_file():
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


def _require_index_fits(directory: Path, index: Mapping[str, Any] | None, entries: list[tuple[str, Entry]]) -> None:
    found: dict[str, str] = {}
    for file, entry in entries:
        if entry.name in found:
            raise InputError(f"{directory}: {entry.name} is in {found[entry.name]} and again in {file}")
        found[entry.name] = file
    if index is None:
        return
    weight_map = index["weight_map"]
    for name in found.keys() | weight_map.keys():
        if found.get(name) != weight_map.get(name):
            raise InputError(
                f"{directory}: {name} is in {found.get(name, 'no file')}, but {INDEX} says "
                f"{weight_map.get(name, 'nothing')}"
            )


def _classified(memory: MemoryModel, file: str, entry: Entry) -> Tensor:
    target = memory.target_of(entry.name)
    expert_axis = memory.expert_axes.get(target) if target is not None else None
    if expert_axis is None:
        return Tensor(entry, file, target, "mtp" if target is None and _is_mtp(memory, entry.name) else "other")
    number = expert_number(entry.name)
    if number is not None:
        if number >= memory.num_experts:
            raise InputError(
                f"{entry.name}: expert {number} of {memory.num_experts}; the config and the weights disagree"
            )
        return Tensor(entry, file, target, "expert", expert_axis.layer, number)
    assert target is not None
    role: Role = "router" if memory.is_router(target) else "fused"
    axis = _axis_on_disk(entry, memory.num_experts, expert_axis.axis, expert_axis.extra)
    if axis is None and entry.elements == 1:  # one scale for all experts of a fused tensor
        return Tensor(entry, file, target)
    if axis is None:
        raise InputError(
            f"{entry.name}: has shape {list(entry.shape)} and belongs to {memory.num_experts} experts, but no axis "
            "of it runs over them; this layout is not understood"
        )
    return Tensor(entry, file, target, role, expert_axis.layer, axis=axis, extra=expert_axis.extra)


def _axis_on_disk(entry: Entry, count: int, axis: int, extra: int) -> int | None:
    """The axis of experts on disk: where it is in memory, else the only one of that size beside axes of size 1."""
    rows = count + extra
    if axis < len(entry.shape) and entry.shape[axis] == rows:
        return axis
    if sorted(entry.shape)[:-1] == [1] * (len(entry.shape) - 1) and rows in entry.shape:
        return entry.shape.index(rows)
    return None


def _is_mtp(memory: MemoryModel, name: str) -> bool:
    """Whether a tensor that transformers does not load is one of a multi-token-prediction layer."""
    layers = getattr(memory.config.get_text_config(), "num_hidden_layers", None)
    beyond = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    is_beyond = beyond is not None and layers is not None and int(beyond.group(1)) >= layers
    return is_beyond or _MTP_NAME.search(name) is not None


def _require_complete(directory: Path, memory: MemoryModel, tensors: tuple[Tensor, ...]) -> None:
    """Every expert has the same tensors, and every parameter with an expert axis is on disk."""
    experts: dict[tuple[str, str], set[int]] = {}
    for tensor in tensors:
        if tensor.role == "expert":
            assert tensor.expert is not None
            before, _, after = tensor.name.rpartition(f"experts.{tensor.expert}.")
            experts.setdefault((before, after), set()).add(tensor.expert)
    for (before, after), ids in experts.items():
        missing = sorted(set(range(memory.num_experts)) - ids)
        if missing:
            name = f"{before}experts.{missing[0]}.{after}"
            raise InputError(
                f"{directory}: {name} is missing, other experts of the layer have it; download the checkpoint again"
            )
    fed = {tensor.target for tensor in tensors}
    for parameter in memory.expert_axes:
        if parameter not in fed:
            raise InputError(
                f"{directory}: no tensor for {parameter}; the checkpoint is incomplete or of another architecture"
            )


def _require_understood_blocks(memory: MemoryModel, tensors: tuple[Tensor, ...]) -> None:
    """A tensor that transformers does not load, in a MoE block and with an axis as long as the experts, is refused."""
    prefixes = tuple(_block_prefixes(tensors))
    for tensor in tensors:
        if tensor.target is not None or tensor.role != "other" or not tensor.name.startswith(prefixes):
            continue
        if memory.num_experts in tensor.entry.shape or expert_number(tensor.name) is not None:
            raise InputError(
                f"{tensor.name}: an unknown tensor of shape {list(tensor.entry.shape)} in a MoE block of "
                f"{memory.num_experts} experts; whether it has to be cut is not known, so nothing is written"
            )


def _require_no_tables_of_experts(memory: MemoryModel, tensors: tuple[Tensor, ...]) -> None:
    """Whole numbers in a router may be expert ids, as in a table of experts by token, and would need renumbering."""
    routers = tuple(name.rpartition(".")[0] + "." for name in memory.router_weights.values())
    integers = {n for n, t in memory.model.state_dict().items() if not t.is_floating_point() and t.numel() > 1}
    for tensor in tensors:
        if tensor.target is not None and tensor.target in integers and tensor.target.startswith(routers):
            raise InputError(
                f"{tensor.name}: whole numbers in a router, perhaps expert ids; how to renumber them is not known"
            )


def _block_prefixes(tensors: tuple[Tensor, ...]) -> Iterator[str]:
    """What the names of a MoE block's tensors begin with on disk, e.g. `model.layers.3.block_sparse_moe.`."""
    prefixes: dict[str, str] = {}
    for tensor in tensors:
        if tensor.layer is not None:
            known = prefixes.get(tensor.layer)
            prefixes[tensor.layer] = tensor.name if known is None else _common_modules(known, tensor.name)
    yield from prefixes.values()


def _common_modules(a: str, b: str) -> str:
    """The longest common prefix that ends after a whole module name."""
    length = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    return a[:length].rpartition(".")[0] + "." if "." in a[:length] else ""


def _version_warnings() -> tuple[str, ...]:
    import transformers

    from moeprune.models.families import VERIFIED_WITH

    if transformers.__version__.startswith(VERIFIED_WITH + "."):
        return ()
    return (f"transformers {transformers.__version__} is installed; checkpoints were verified with {VERIFIED_WITH}",)
