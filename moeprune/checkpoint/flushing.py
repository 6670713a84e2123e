"""Bytes reach the disk in a thread of its own while more of them are copied, so that flushing adds little time."""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

STEP = 64 * 2**20  # bytes; written ones are flushed at least this many at a time


class Flusher:
    """Use as a context manager; leaving it waits for everything handed over."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._running: Future[None] | None = None
        self._unflushed = 0

    def __enter__(self) -> "Flusher":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._wait()
        finally:
            self._thread.shutdown()

    def grown(self, descriptor: int, count: int) -> None:
        """Say that a file got `count` more bytes; they are flushed some time soon, unless the thread is busy."""
        self._unflushed += count
        if self._unflushed >= STEP and (self._running is None or self._running.done()):
            self._wait()
            self._unflushed = 0
            self._running = self._thread.submit(
                getattr(os, "fdatasync", os.fsync), descriptor
            )  # macOS has no fdatasync

    def finished(self, descriptor: int, part: Path, final: Path) -> None:
        """Flush and close a file and give it its final name, which only whole files have. One at most is under way."""
        self._wait()
        self._running = self._thread.submit(_finish, descriptor, part, final)

    def _wait(self) -> None:
        """An error is reported once for each file: no call may be forgotten."""
        if self._running is not None:
            self._running.result()


def _finish(descriptor: int, part: Path, final: Path) -> None:
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    part.rename(final)


def write_flushed(path: Path, text: str) -> None:
    """A text file whose bytes are on the disk when this returns."""
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
