"""Carry an export's edits out with the checkpoint room's parts, without its placing and auditing."""

import os
import shutil
from pathlib import Path

from moeprune.checkpoint.rewrite import plan_work
from moeprune.checkpoint.shards import write_shard


def write(checkpoint, edits, config_edits, target: Path) -> Path:
    """The target directory with the source's files, edited."""
    work = plan_work(checkpoint, edits, config_edits=config_edits)
    target.mkdir(parents=True)
    for shard in work.shards:
        os.close(write_shard(shard, checkpoint.directory / shard.name, target / shard.name, lambda *_: None))
    for name in work.copied:
        shutil.copy(checkpoint.directory / name, target / name)
    for name, text in work.texts.items():
        (target / name).write_text(text)
    return target


def same_names_inventory(directory: Path):
    """An inventory of a single-file checkpoint whose tensors are named on disk as in memory, of any model type."""
    import json

    from moeprune.artifacts.safetensors_files import read_header
    from moeprune.checkpoint.inventory import SINGLE, Inventory, Tensor

    entries, metadata = read_header(directory / SINGLE)
    tensors = tuple(Tensor(entry, SINGLE, entry.name) for entry in entries)
    text = (directory / "config.json").read_text()
    by_name = {tensor.name: tensor for tensor in tensors}
    return Inventory(directory, text, json.loads(text), None, tensors, {SINGLE: metadata}, None, (), by_name)
