"""Checks before and after writing: whether a plan fits a checkpoint, and whether the result is what was planned."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import read_json
from moeprune.artifacts.plan import PrunePlan
from moeprune.artifacts.safetensors_files import Entry, read_header
from moeprune.artifacts.statistics import Layer
from moeprune.checkpoint.inventory import INDEX, Inventory, checkpoint_fingerprint, read_floats, router_tensor
from moeprune.checkpoint.options import MtpPolicy
from moeprune.checkpoint.shards import Shard


class AuditError(RuntimeError):
    """The written checkpoint is not what it should be; it was not put in place."""


@dataclass(frozen=True)
class Audit:
    """What was checked and found right."""

    tensors: int  # on disk, each with the planned file, name, type, shape and size
    dropped: int  # tensors of the source that have no counterpart
    files: int  # of the directory, exactly the planned ones
    routers: int  # layers whose router rows were read back and compared
    reload: str  # "strict", or why it was left out
    unused: tuple[str, ...] = ()  # names that transformers does not load, neither here nor from the source


def require_headers(directory: Path, shards: Iterable[Shard]) -> dict[str, Entry]:
    """Every tensor on disk by name. Raises AuditError at the first that is not as planned, missing or too many."""
    on_disk: dict[str, Entry] = {}
    for shard in shards:
        entries, _ = read_header(directory / shard.name)
        planned = [(o.name, o.dtype, o.shape, o.size) for o in shard.outputs]
        actual = [(e.name, e.dtype, e.shape, e.size) for e in entries]
        # Tensors without elements take no bytes: their place among the others is free.
        for want, have in zip(sorted(planned), sorted(actual), strict=False):
            if want != have:
                raise AuditError(f"{shard.name}: expected {want}, found {have}")
        if len(planned) != len(actual):
            raise AuditError(f"{shard.name}: {len(planned)} tensors expected, {len(actual)} found")
        on_disk |= {entry.name: entry for entry in entries}
    return on_disk


def require_files(directory: Path, expected: Iterable[str]) -> int:
    """The number of files. Raises AuditError unless the directory, and its index, hold exactly the expected ones."""
    present = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    expected = set(expected)
    if present != expected:
        raise AuditError(f"files differ from what was planned: {sorted(present ^ expected)}")
    if INDEX in present:
        indexed = set(read_json(directory / INDEX)["weight_map"].values())
        shards = {name for name in present if name.endswith(".safetensors")}
        if indexed != shards:
            raise AuditError(f"{INDEX} and the files differ: {sorted(indexed ^ shards)}")
    return len(present)


def require_reload(config: Any, entries: Mapping[str, Entry], source: Inventory) -> tuple[str, ...]:
    """The names transformers does not use. Loads the model from tensors without data, through its own loading path.

    Raises AuditError for a parameter that would stay uninitialised, has another shape, or a name it does not expect and
    did not find in the source either.
    """
    missing, unexpected = reload_keys(config, entries)
    if missing:
        raise AuditError(f"{len(missing)} parameters would stay uninitialised, first {min(missing)}")
    known = {tensor.name for tensor in source.tensors if tensor.target is None}
    new = unexpected - known - {name for name in unexpected if source.memory.target_of(name) is None}
    if new:
        raise AuditError(f"{len(new)} tensors are not expected by the model, first {min(new)}")
    return tuple(sorted(unexpected))


def reload_keys(config: Any, entries: Mapping[str, Entry]) -> tuple[set[str], set[str]]:
    """(missing, unexpected) names of a load with these tensors. Raises AuditError for shapes that do not fit."""
    import torch

    from moeprune.models.disk_tensors import DTYPES
    from moeprune.models.loading import model_class

    tensors = {
        name: torch.empty(entry.shape, dtype=DTYPES.get(entry.dtype, torch.uint8), device="meta")
        for name, entry in entries.items()
    }
    try:
        with _quiet_loading():
            loader, config = model_class(config)
            _, info = loader.from_pretrained(
                None, config=config, state_dict=tensors, device_map="meta", output_loading_info=True
            )
    except RuntimeError as error:  # transformers' answer to shapes that do not fit and to conversions that fail
        raise AuditError(f"transformers does not load the checkpoint: {error}") from error
    if info["mismatched_keys"] or info["error_msgs"]:
        raise AuditError(f"transformers does not load the checkpoint: {info['mismatched_keys'] or info['error_msgs']}")
    return set(info["missing_keys"]), set(info["unexpected_keys"])


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """Without transformers' own progress bar and report: what it found is returned, not printed."""
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


def require_routers(
    directory: Path, entries: Mapping[str, Entry], source: Inventory, orders: Mapping[str, Sequence[int]]
) -> list[np.ndarray]:
    """Every router's projection (experts, hidden), float32, read back from disk.

    Raises AuditError unless its rows are those of the kept experts, in order.
    """
    projections = []
    for layer in source.layers:
        tensor = router_tensor(source, layer.name)
        expected = read_floats(source.directory / tensor.shard, tensor.entry)
        projections.append(read_floats(directory / tensor.shard, entries[tensor.name]))
        order = [*orders.get(layer.name, range(layer.num_experts)), *source.memory.extra_ids(layer.name)]
        if not np.array_equal(expected[order], projections[-1], equal_nan=True):
            raise AuditError(f"{layer.name}: the router's rows are not those of the kept experts")
    return projections


def require_counts(config: Any, source: Inventory, count: int) -> None:
    """Raises AuditError unless a model of this config has the source's MoE layers with `count` experts each."""
    from moeprune.models.layers import find_moe_layers
    from moeprune.models.loading import empty_model

    layers = [(layer.name, layer.info.num_experts) for layer in find_moe_layers(empty_model(config))]
    expected = [(layer.name, count) for layer in source.layers]
    if layers != expected:
        raise AuditError(f"config.json describes other layers than planned: {sorted(set(layers) ^ set(expected))[:4]}")


def logits_difference(
    directory: Path, reference: Callable[[Any], Any], input_ids: Any, *, dtype: str = "float32"
) -> float:
    """Largest absolute difference of the checkpoint's logits from `reference(input_ids)` (batch, length, vocabulary).

    `reference` is usually the base model inside `with pruned(model, plan):`. Loads the checkpoint into memory.
    """
    import torch

    from moeprune.models.loading import auto_class, load_config

    config = load_config(directory)
    model = auto_class(config).from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
    with torch.no_grad():
        logits = model(input_ids=input_ids).logits.float()
        return float((logits - reference(input_ids).float()).abs().max())


def require_plan_fits(checkpoint: Inventory, plan: PrunePlan, mtp: MtpPolicy) -> int:
    """The number of experts every layer keeps. Raises InputError with the way out when the plan cannot be written."""
    place = str(checkpoint.directory)
    if not checkpoint.layers:
        raise InputError(f"{place}: a dense model, with no experts to prune; use `moeprune compress` for dense weights")
    kept = _uniform_count(plan)
    plan.require_model(checkpoint_fingerprint(checkpoint), place)
    plan.require_layers(checkpoint.layers, place)
    for layer in checkpoint.layers:
        require_routable(layer, plan.kept[layer.name])
    if checkpoint.mtp and mtp == "refuse":
        first = checkpoint.mtp[0].name
        raise InputError(
            f"{place}: {len(checkpoint.mtp)} tensors are of multi-token-prediction layers (first: {first}); they "
            "have experts of their own that no statistics were recorded for, and a full head on a pruned model does "
            "not load. Set checkpoint.mtp=drop (--mtp drop) to leave them out; speculative decoding with them goes too"
        )
    return kept


def _uniform_count(plan: PrunePlan) -> int:
    if plan.uniform_count is not None:
        return plan.uniform_count
    layers = defaultdict(list)
    for layer in plan.layers:
        layers[len(layer.kept)].append(layer.name)
    text = "; ".join(f"{count} in {', '.join(names)}" for count, names in sorted(layers.items()))
    raise InputError(
        f"plan: the layers keep different numbers of experts ({text}), but a config holds one count for all: "
        "transformers and serving engines load nothing else; use selection.budget.scope=layer, or evaluate in memory"
    )


def require_routable(layer: Layer, kept: tuple[int, ...]) -> None:
    """Raises InputError unless the router still works with the kept experts: top_k, and the groups' rules."""
    count = len(kept)
    if count < max(layer.top_k, 2):
        raise InputError(
            f"{layer.name}: keeps {count} experts but the router picks top_k={layer.top_k} and needs at least 2; lower "
            "selection.budget.prune"
        )
    groups = layer.num_groups
    if groups <= 1:
        return
    size = layer.num_experts // groups
    per_group = {sum(expert // size == group for expert in kept) for group in range(groups)}
    if len(per_group) > 1:
        raise InputError(
            f"{layer.name}: the router has {groups} groups of {size} experts and the plan keeps {sorted(per_group)} of "
            "them; experts would change group, keep the same number in each"
        )
    if count // groups < layer.group_minimum:
        raise InputError(
            f"{layer.name}: keeps {count // groups} experts in each of {groups} groups, whose score needs "
            f"{layer.group_minimum}; lower selection.budget.prune"
        )
    reachable = layer.topk_group * count // groups
    if reachable < layer.top_k:
        raise InputError(
            f"{layer.name}: a token may draw from {layer.topk_group} of {groups} groups, so {reachable} of {count} "
            f"experts are in reach, but the router picks top_k={layer.top_k}; lower selection.budget.prune"
        )
