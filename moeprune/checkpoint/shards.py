"""The files of the result: what goes into each, and how its bytes get there with one buffer in memory.

Bytes reach the disk in a thread of its own while more of them are copied, so that flushing adds little time.
"""

import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from io import FileIO
from pathlib import Path
from types import TracebackType

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.safetensors_files import header_bytes
from moeprune.checkpoint.edits import Edits, Output, joined, outputs
from moeprune.checkpoint.inventory import Inventory

OnBytes = Callable[[int, int], None]  # descriptor of the file that grew, by how many bytes

BUFFER = 256 * 2**10  # bytes


@dataclass(frozen=True)
class Shard:
    """One file of the result, made from the source file of the same name."""

    name: str
    header: bytes
    outputs: tuple[Output, ...]  # in the order of their bytes

    @cached_property
    def size(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + sum(output.size for output in self.outputs)


def plan_shards(checkpoint: Inventory, edits: Edits) -> tuple[Shard, ...]:
    """The files of the result under the source's file names; a file that nothing is left of is not written."""
    unknown = sorted(set(edits) - set(checkpoint.by_name))
    assert not unknown, f"edits of tensors that are not in the checkpoint: {unknown[:3]}"
    by_shard: dict[str, list[Output]] = {shard: [] for shard in checkpoint.shards}
    seen: set[str] = set()
    for tensor in checkpoint.tensors:
        for output in outputs(tensor, edits.get(tensor.name)):
            assert output.name not in seen, f"two tensors would be named {output.name}"
            seen.add(output.name)
            by_shard[tensor.shard].append(output)
    return tuple(
        _shard(name, tensors_of, checkpoint.metadata[name]) for name, tensors_of in by_shard.items() if tensors_of
    )


def _shard(name: str, tensors_of: list[Output], metadata: Mapping[str, str]) -> Shard:
    # Wide types first, as the format's own writer does: every tensor then starts at a multiple of its element size,
    # which readers that map the file need and a sliced tensor in the source's order could break.
    tensors_of = sorted(tensors_of, key=lambda output: -_alignment(output))
    header = header_bytes(((o.name, o.dtype, o.shape, o.size) for o in tensors_of), metadata)
    return Shard(name, header, tuple(tensors_of))


def _alignment(output: Output) -> int:
    elements = math.prod(output.shape)
    return max(1, output.size // elements) if elements else 1


def write_shard(shard: Shard, source: Path, target: Path, on_bytes: OnBytes) -> int:
    """The open file descriptor of `target`, which now has the shard's bytes; not flushed to disk yet.

    One buffer is in memory at a time, or one tensor that was made elsewhere.
    """
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        with source.open("rb", buffering=0) as file:
            write_all(descriptor, shard.header)
            pending: list[tuple[int, int]] = []
            for output in shard.outputs:
                if output.data is None:
                    pending += output.spans
                    continue
                _copy_spans(file, descriptor, pending, on_bytes)
                pending = []
                data = memoryview(output.data()).cast("B")
                assert len(data) == output.size, f"{output.name}: {len(data)} bytes, {output.size} announced"
                write_all(descriptor, data)
                on_bytes(descriptor, output.size)
            _copy_spans(file, descriptor, pending, on_bytes)
        written = os.fstat(descriptor).st_size
        if written != shard.size:
            raise OSError(f"{target}: {written} bytes were written, {shard.size} expected; did the source change?")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _copy_spans(source: FileIO, target: int, spans: list[tuple[int, int]], on_bytes: OnBytes) -> None:
    # Reading and writing through a buffer that stays in the processor's cache takes less time than copy_file_range,
    # sendfile or a memory map, and works between any two filesystems.
    buffer = memoryview(bytearray(BUFFER))
    for start, stop in joined(spans):
        source.seek(start)
        while start < stop:
            count = source.readinto(buffer[: min(BUFFER, stop - start)])
            if not count:
                raise InputError("the source file became shorter while it was read; nothing was put in place")
            write_all(target, buffer[:count])
            start += count
            on_bytes(target, count)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


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
