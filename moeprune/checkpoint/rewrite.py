"""A new checkpoint from a source and edits: all decided first, then written file by file, then put in place."""

import errno
import hashlib
import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import sha256
from moeprune.artifacts.safetensors_files import Entry
from moeprune.checkpoint.atomic_directory import PART, AtomicDirectory
from moeprune.checkpoint.audit import AuditError, require_files, require_headers
from moeprune.checkpoint.config_json import Edits as ConfigEdits
from moeprune.checkpoint.config_json import edit_text
from moeprune.checkpoint.edits import Edits
from moeprune.checkpoint.inventory import INDEX, Inventory
from moeprune.checkpoint.shards import Flusher, Shard, plan_shards, write_flushed, write_shard

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
    own_files = {*checkpoint.shards, CONFIG, CARD, RECORD, *([INDEX] if checkpoint.index is not None else [])}
    copied, left_out, size = [], [], 0
    for folder, directories, files in os.walk(checkpoint.directory, followlinks=True):
        directories[:] = sorted(name for name in directories if _is_walked(Path(folder, name)))
        for file in files:
            path = Path(folder, file)
            name = path.relative_to(checkpoint.directory).as_posix()
            if name in own_files:
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


Progress = Callable[[int, int], None]  # bytes written, bytes in all
Finish = Callable[[Path, Mapping[str, Entry]], Mapping[str, str]]  # checks the directory; texts to add: name -> text


@dataclass(frozen=True)
class Work:
    """What will be written; nothing has been."""

    source: Inventory
    shards: tuple[Shard, ...]
    texts: Mapping[str, str]  # config.json, the index, and other JSON files that change
    copied: tuple[str, ...]  # files carried over byte for byte
    warnings: tuple[str, ...]
    key: str  # equal for equal results from an unchanged source; a killed call with the same key is resumed

    @cached_property
    def size(self) -> int:
        """Bytes of the files with weights."""
        return sum(shard.size for shard in self.shards)

    @property
    def entries(self) -> dict[str, Entry]:
        """What the headers of the result will say: name -> type and shape (the byte ranges are not the file's)."""
        return {o.name: Entry(o.name, o.dtype, o.shape, 0, o.size) for shard in self.shards for o in shard.outputs}

    @property
    def tensor_bytes(self) -> int:
        return sum(output.size for shard in self.shards for output in shard.outputs)

    @property
    def elements(self) -> int:
        return sum(math.prod(output.shape) for shard in self.shards for output in shard.outputs)

    def hashes(self, directory: Path) -> dict[str, str]:
        """File -> sha256 of what was written to `directory`; of the files with weights, of their headers alone."""
        hashes = {shard.name + "#header": hashlib.sha256(shard.header).hexdigest() for shard in self.shards}
        return hashes | {name: sha256(directory / name) for name in (*self.copied, *self.texts)}


def plan_work(
    source: Inventory, edits: Edits, *, config_edits: ConfigEdits, texts: Mapping[str, str] | None = None
) -> Work:
    """The work that carries out edits of tensors and of config.json; `texts` replace other files of the source."""
    shards = plan_shards(source, edits)
    others = other_files(source)
    texts = {**(texts or {}), CONFIG: edit_text(source.config_text, config_edits)}
    if source.index is not None:
        texts[INDEX] = _index_text(source.index, shards)
    copied = tuple(name for name in others.copied if name not in texts)
    warnings: tuple[str, ...] = ()
    if others.left_out:
        warnings = (f"weights of the unpruned model in other formats were left out: {', '.join(others.left_out)}",)
    return Work(source, shards, texts, copied, warnings, _key(source, shards, texts, copied))


def write_work(work: Work, destination: AtomicDirectory, *, finish: Finish, on_progress: Progress | None = None) -> int:
    """The number of weight files that a killed call had left whole and that were used again.

    `finish` sees the directory before it is in place and may still refuse it; after a failed check nothing is left.
    Raises InputError when the disk has too little room.
    """
    with destination.open(work.key):
        done = {shard.name for shard in work.shards if _is_whole(destination.directory / shard.name, shard)}
        _clear(destination.directory, keep=done)
        _require_room(work, destination, done)
        _write_files(work, destination, done, on_progress or (lambda done, total: None))
        try:
            entries = require_headers(destination.directory, work.shards)
            documents = finish(destination.directory, entries)
            for name, text in documents.items():
                write_flushed(destination.directory / name, text)
            expected = [shard.name for shard in work.shards]
            require_files(destination.directory, [*expected, *work.copied, *work.texts, *documents])
        except AuditError:
            destination.discard()
            raise
        destination.commit(work.key)
    return len(done)


def _write_files(work: Work, destination: AtomicDirectory, done: set[str], on_progress: Progress) -> None:
    try:
        _write_shards(work, destination.directory, done, on_progress)
        for name in work.copied:
            copy_file(work.source.directory / name, destination.directory / name)
        for name, text in work.texts.items():
            write_flushed(destination.directory / name, text)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise InputError(
            f"{destination.target}: the disk is full; make room and start again, what is whole so far will be used (it "
            f"is in {destination.partial}; or remove that)"
        ) from error


def _write_shards(work: Work, directory: Path, done: set[str], on_progress: Progress) -> None:
    written = sum(shard.size for shard in work.shards if shard.name in done)

    def advance(count: int) -> None:
        nonlocal written
        written += count
        on_progress(written, work.size)

    with Flusher() as flusher:

        def copied(descriptor: int, count: int) -> None:
            flusher.grown(descriptor, count)
            advance(count)

        for shard in work.shards:
            if shard.name in done:
                continue
            part = directory / (shard.name + PART)
            part.parent.mkdir(parents=True, exist_ok=True)
            descriptor = write_shard(shard, work.source.directory / shard.name, part, copied)
            flusher.finished(descriptor, part, directory / shard.name)
            advance(len(shard.header))


def _is_whole(path: Path, shard: Shard) -> bool:
    return path.is_file() and path.stat().st_size == shard.size


def _clear(directory: Path, keep: Iterable[str]) -> None:
    """Remove what a killed call left, apart from whole files with weights."""
    kept = {directory / name for name in keep}
    for path in sorted(directory.rglob("*"), reverse=True):
        if path.is_dir():
            if not any(path.iterdir()):
                path.rmdir()
        elif path not in kept:
            path.unlink()


def _require_room(work: Work, destination: AtomicDirectory, done: set[str]) -> None:
    needed = sum(shard.size for shard in work.shards if shard.name not in done)
    needed += sum((work.source.directory / name).stat().st_size for name in work.copied)
    free = shutil.disk_usage(destination.directory).free
    if needed > free:
        raise InputError(
            f"{destination.target}: {needed / 2**30:.2f} GiB are needed beside it and {free / 2**30:.2f} GiB are free; "
            "make room or give a directory on another disk"
        )


def _index_text(index: Mapping[str, Any], shards: Iterable[Shard]) -> str:
    outputs = [(output, shard.name) for shard in shards for output in shard.outputs]
    metadata = dict(index.get("metadata") or {})
    totals = {
        "total_size": sum(o.size for o, _ in outputs),
        "total_parameters": sum(math.prod(o.shape) for o, _ in outputs),
    }
    metadata |= {key: value for key, value in totals.items() if key in metadata or key == "total_size"}
    value = {**index, "metadata": metadata, "weight_map": {output.name: name for output, name in outputs}}
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def _key(source: Inventory, shards: Iterable[Shard], texts: Mapping[str, str], copied: Iterable[str]) -> str:
    """A digest of the source's files (by size and time) and of every byte range that goes into the result."""
    digest = hashlib.sha256()
    for name in (*source.shards, *copied):
        status = (source.directory / name).stat()
        digest.update(f"{name}:{status.st_size}:{status.st_mtime_ns}\n".encode())
    for shard in shards:
        digest.update(shard.header)
        for output in shard.outputs:
            digest.update(repr(output.spans).encode())
            if output.data is not None:  # made elsewhere: without a key two calls cannot be told apart, none is resumed
                digest.update(uuid.uuid4().bytes if output.key is None else output.key.encode())
    digest.update(json.dumps(texts, sort_keys=True).encode())
    return digest.hexdigest()[:16]
