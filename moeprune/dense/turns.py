"""All batches walk through the model block by block, each in its own run of the model's own forward.

    with Turns(blocks, [lambda: model(**first), lambda: model(**second)]) as turns:
        for block in range(len(blocks)):
            for batch in turns.watch(block): ...     # the block has run for this batch, its output is dropped
            ...                                      # change the block's weights here
            turns.go_on(block)                       # the block runs again, and its output is what the next one gets

Every run sits in a thread and is parked in front of the next block; one thread runs at a time. So masks, position
embeddings, caches and whatever else a family hands to its layers are the model's own, and nothing here knows a family.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import torch
from torch import nn

from moeprune.artifacts.errors import InputError


class _Stopped(BaseException):
    """Unwinds a parked run."""


class _Run:
    """One batch's run of the model and the two locks it is driven by."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.turn, self.parked = threading.Semaphore(0), threading.Semaphore(0)
        self.at: int | None = None  # the block it is parked at
        self.again = False  # run the block and come back
        self.stopped = False
        self.future: Future[None] | None = None

    def main(self) -> None:
        _current.run = self
        self._wait()
        with torch.no_grad():
            self.work()

    def park(self, block: int) -> None:
        self.at = block
        self.parked.release()
        self._wait()

    def _wait(self) -> None:
        self.turn.acquire()
        if self.stopped:
            raise _Stopped

    def step(self) -> None:
        """Let it run until it parks or ends; an error in it is raised here."""
        assert self.future is not None
        self.at = None
        self.turn.release()
        self.parked.acquire()
        if self.at is None:
            self.future.result()


_current = threading.local()


class Turns:
    """Runs of the model that stop in front of every block. Blocks are modules that each run calls once, in order."""

    def __init__(self, blocks: Sequence[nn.Module], runs: Sequence[Callable[[], Any]]) -> None:
        self.blocks = blocks
        self.runs = [_Run(work) for work in runs]
        self._forwards: list[tuple[nn.Module, Any]] = []

    def __enter__(self) -> "Turns":
        for number, block in enumerate(self.blocks):
            self._forwards.append((block, block.__dict__.get("forward")))
            block.forward = _parking(number, block.forward)
        self._pool = ThreadPoolExecutor(max_workers=max(1, len(self.runs)), thread_name_prefix="batch")
        for run in self.runs:
            run.future = self._pool.submit(run.main)
            run.future.add_done_callback(lambda _, run=run: run.parked.release())  # type: ignore[misc]
        for run in self.runs:
            run.step()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for run in self.runs:
            run.stopped = True
            run.turn.release()
        self._pool.shutdown()
        for block, forward in self._forwards:
            if forward is None:
                del block.forward
            else:
                block.forward = forward

    def watch(self, block: int) -> Iterator[int]:
        """Every batch's number, each time before the block runs once for it; what it returns is dropped."""
        for number, run in enumerate(self.runs):
            self._require(run, block)
            yield number
            run.again = True
            run.step()

    def go_on(self, block: int) -> None:
        """Every batch runs the block as it is now and goes to the next one, or to the end."""
        for run in self.runs:
            self._require(run, block)
            run.again = False
            run.step()
            if run.at is None and block + 1 < len(self.blocks):
                raise InputError(
                    f"the model ended after block {block} of {len(self.blocks)}; it cannot be walked block by block"
                )

    def _require(self, run: _Run, block: int) -> None:
        if run.at != block:
            raise InputError(
                f"the model calls its blocks out of order: at {run.at}, expected {block}; it cannot be walked"
            )


def _parking(number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
    def parked(*args: Any, **kwargs: Any) -> Any:
        run: _Run = _current.run
        run.park(number)
        while run.again:
            forward(*args, **kwargs)
            run.park(number)
        return forward(*args, **kwargs)

    return parked
