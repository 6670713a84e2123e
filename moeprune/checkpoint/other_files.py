"""The files of a checkpoint that are not its weights: which are carried over, and copying them byte for byte."""

import hashlib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from moeprune.artifacts.errors import InputError
from moeprune.checkpoint.inventory import INDEX, Inventory

CARD = "README.md"
RECORD = "moeprune.json"
CONFIG = "config.json"

_SKIPPED_DIRECTORIES = {".git", ".cache", "__pycache__", ".ipynb_checkpoints"}
# The unpruned weights once more, in another format: wrong beside a pruned model.
_OTHER_WEIGHTS = re.compile(
    r"(?:.*\.safetensors|.*\.safetensors\.index\.json|(?:pytorch_model|model|consolidated).*\.(?:bin|pt|pth)|pytorch_model\.bin\.index\.json"
    r"|.*\.gguf|.*\.onnx|.*\.onnx_data|tf_model\.h5|flax_model\.msgpack|rust_model\.ot)"
)


@dataclass(frozen=True)
class OtherFiles:
    """Paths relative to the source directory, sorted."""

    copied: tuple[str, ...]
    left_out: tuple[str, ...]  # weights of the unpruned model in other formats
    bytes: int  # of the copied ones


def other_files(checkpoint: Inventory) -> OtherFiles:
    """Every file that is carried over as it is: not the weights, index, config.json, model card or moeprune.json.

    Raises InputError for a link that leads nowhere.
    """
    made = {*checkpoint.shards, CONFIG, CARD, RECORD, *([INDEX] if checkpoint.index is not None else [])}
    copied, left_out, size = [], [], 0
    for folder, directories, files in os.walk(checkpoint.directory, followlinks=True):
        directories[:] = sorted(name for name in directories if _is_walked(Path(folder, name)))
        for file in files:
            path = Path(folder, file)
            name = path.relative_to(checkpoint.directory).as_posix()
            if name in made:
                continue
            if not path.is_file():
                raise InputError(f"{path}: a link that leads nowhere; download the checkpoint again")
            if _OTHER_WEIGHTS.fullmatch(file):
                left_out.append(name)
            else:
                copied.append(name)
                size += path.stat().st_size
    return OtherFiles(tuple(sorted(copied)), tuple(sorted(left_out)), size)


def _is_walked(directory: Path) -> bool:
    is_loop = directory.is_symlink() and directory.resolve() in directory.parents
    return directory.name not in _SKIPPED_DIRECTORIES and not is_loop


def copy_file(source: Path, target: Path) -> None:
    """The same bytes, flushed to disk, with a new file's mode: a source may be read-only or a link into a cache."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as read, target.open("wb") as write:
        shutil.copyfileobj(read, write, 2**20)
        write.flush()
        os.fsync(write.fileno())


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()
