"""Tiny checkpoints on disk, plans for them, and what is in a checkpoint as plain bytes."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from moeprune.artifacts.plan import LayerPlan, PrunePlan
from moeprune.artifacts.safetensors_files import read_header
from moeprune.checkpoint.inventory import checkpoint_fingerprint, inventory

CORE = ("qwen3_moe", "qwen3_next", "mixtral", "olmoe", "deepseek_v3", "glm4_moe")
KEPT = (0, 2, 3, 5, 6, 7)  # three in each half, so it also fits a router with two groups
INDEX = "model.safetensors.index.json"


def plan_for(directory: Path, kept: Sequence[int] | Mapping[str, Sequence[int]] = KEPT) -> PrunePlan:
    """A plan that keeps these experts in every layer, or in each layer by name."""
    checkpoint = inventory(directory)
    return PrunePlan(
        model_type=checkpoint.memory.model_type,
        model_fingerprint=checkpoint_fingerprint(checkpoint),
        statistics_key="0123456789ab",
        criterion={"name": "hope", "product": "norms"},
        solver={"name": "swap", "starts": 16},
        budget={"prune": 0.25},
        mix={"agent": 1.0},
        layers=tuple(
            LayerPlan(
                name=layer.name,
                num_experts=layer.num_experts,
                top_k=layer.top_k,
                num_groups=layer.num_groups,
                kept=tuple(kept[layer.name] if isinstance(kept, Mapping) else kept),
            )
            for layer in checkpoint.layers
        ),
    )


def contents(directory: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor of every safetensors file: name -> (type, shape, bytes)."""
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        data = path.read_bytes()
        for entry in read_header(path)[0]:
            assert entry.name not in found
            found[entry.name] = (entry.dtype, entry.shape, data[entry.start : entry.stop])
    return found


def files(directory: Path) -> dict[str, bytes]:
    """Every file below the directory: relative path -> bytes."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    return found


def save_single(directory: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Replace the directory's weights by one file."""
    for path in [*directory.glob("*.safetensors"), directory / INDEX]:
        path.unlink(missing_ok=True)
    save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})


def add_shard(directory: Path, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Add a file of tensors to a sharded checkpoint and to its index."""
    save_file(dict(tensors), directory / name, metadata={"format": "pt"})
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"] |= dict.fromkeys(tensors, name)
    (directory / INDEX).write_text(json.dumps(index, indent=2))


def edit_config(directory: Path, **changes) -> dict:
    """Set keys of config.json (None removes one) and return it."""
    config = json.loads((directory / "config.json").read_text())
    config = {key: value for key, value in {**config, **changes}.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    return config
