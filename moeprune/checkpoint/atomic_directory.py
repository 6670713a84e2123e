"""A directory that appears at its path whole or not at all, and whose making can be resumed after a kill.

It is built in `.<name>.moeprune-partial/checkpoint` beside the target:

    .out.moeprune-partial/
      lock           held by the process that writes
      state.json     {"key": what is being written, "phase": "writing" | "placing"}
      checkpoint/    the new directory; files in it that have their final name are whole
      previous/      the replaced directory, for a moment, where the filesystem cannot exchange two directories
"""

import ctypes
import errno
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import write_json

PART = ".part"  # suffix of a file that is being written
_EXCHANGE = 2  # RENAME_EXCHANGE of linux/fs.h
_AT_FDCWD = -100


class AtomicDirectory:
    """The directory at `target`, and the one beside it that is being built.

    Raises InputError at once for a target that must not or cannot be replaced.
    """

    def __init__(self, target: Path, *, source: Path, overwrite: bool) -> None:
        self.target = Path(os.path.realpath(target.expanduser()))
        self.partial = self.target.with_name(f".{self.target.name}.moeprune-partial")
        self.directory = self.partial / "checkpoint"
        real = Path(os.path.realpath(source))
        if self.target == real or real in self.target.parents or self.target in real.parents:
            raise InputError(f"{target}: is the source, inside it or around it; give another output directory")
        if self.target.exists() and not self.target.is_dir():
            raise InputError(f"{target}: is a file; give a directory that does not exist yet")
        if os.path.ismount(self.target):
            raise InputError(
                f"{target}: is a mount point and cannot be replaced as a whole; give a directory inside it"
            )
        current = Path.cwd()
        if self.target in (current, *current.parents, Path.home()) or (self.target / ".git").exists():
            raise InputError(f"{target}: holds more than a checkpoint and is not replaced; give a directory of its own")
        if not overwrite and self.target.is_dir() and any(self.target.iterdir()):
            raise InputError(f"{target}: is not empty; give another directory, or --overwrite to replace it as a whole")

    @contextmanager
    def open(self, key: str) -> Iterator[None]:
        """Inside, `directory` exists: with what an interrupted call left of the same `key`, otherwise empty.

        Raises InputError when another process is writing to the same target.
        """
        self.partial.mkdir(parents=True, exist_ok=True)
        with _locked(self.partial / "lock", self.target):
            self._restore_previous()
            if not self._is_resumable(key):
                _remove(self.directory)
            self.directory.mkdir(exist_ok=True)
            self._set_state(key, "writing")
            try:
                yield
            except BaseException:
                if self.directory.is_dir() and not any(self.directory.iterdir()):  # nothing to resume from
                    _remove(self.partial)
                raise

    def _is_resumable(self, key: str) -> bool:
        try:
            state: Any = json.loads((self.partial / "state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        # After "placing" began, `checkpoint` may already be the directory that was replaced.
        return state == {"key": key, "phase": "writing"}

    def _set_state(self, key: str, phase: str) -> None:
        write_json(self.partial / "state.json", {"key": key, "phase": phase})

    def _restore_previous(self) -> None:
        previous = self.partial / "previous"
        if previous.exists() and not self.target.exists():
            previous.rename(self.target)
        _remove(previous)

    def commit(self, key: str) -> None:
        """Put the finished directory in place of the target and clear up. Only inside `open`."""
        for folder, _, _ in os.walk(self.directory):
            sync_directory(Path(folder))
        self._set_state(key, "placing")
        if not self.target.exists():
            self.directory.rename(self.target)
        elif not exchange(self.directory, self.target):
            self.target.rename(self.partial / "previous")
            self.directory.rename(self.target)
        sync_directory(self.target.parent)
        _remove(self.partial)

    def discard(self) -> None:
        """Remove everything that was written so far."""
        _remove(self.partial)


@contextmanager
def _locked(path: Path, target: Path) -> Iterator[None]:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise InputError(
                f"{target}: another process is writing there; wait for it or give another directory"
            ) from error
        # The holder before may have finished and removed the file between our open and our lock.
        try:
            if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                break
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
        os.close(descriptor)
    try:
        yield
    finally:
        os.close(descriptor)


def exchange(a: Path, b: Path) -> bool:
    """Swap two directories in one step; False where the system or the filesystem cannot."""
    if not sys.platform.startswith("linux"):
        return False
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(b))


def sync_directory(path: Path) -> None:
    """Flush the names in a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
