"""All batches walk through the model block by block, each in its own run of the model's own forward.

    with Turns(blocks, [lambda: model(**first), lambda: model(**second)]) as turns:
        for block in range(len(blocks)):
            for batch in turns.watch(block): ...     # the block has run for this batch, its output is dropped
            ...                                      # change the block's weights here
            turns.go_on(block)                       # the block runs again, and its output is what the next one gets

Every run sits in a thread of its own and is parked in front of the next block; one runs at a time. So masks, position
embeddings, caches and whatever else a family hands to its layers are the model's own, and nothing here knows a family.
The blocks themselves are computed in the caller's thread: a thread that computes gets a team of helpers from OpenMP,
and a team for each batch would be too many. What stays in the threads is little, and done without a team.
The hidden states of all batches are kept from block to block.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn

from moeprune.artifacts.errors import InputError


class _Stopped(BaseException):
    """Unwinds a parked run."""


@dataclass(frozen=True)
class _Job:
    """A call of a block that waits to be computed."""

    block: int
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def compute(self) -> Any:
        with torch.no_grad():
            return self.forward(*self.args, **self.kwargs)


class _Run:
    """One batch's run of the model and the two locks it is driven by."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.turn, self.parked = threading.Semaphore(0), threading.Semaphore(0)
        self.job: _Job | None = None  # None while it runs and after its end
        self.output: Any = None  # of the job
        self.stopped = False
        self.future: Future[None] | None = None

    def main(self) -> None:
        _current.run = self
        self._wait()
        torch.set_num_threads(1)
        with torch.no_grad():
            self.work()

    def park(self, job: _Job) -> Any:
        """Wait with a call of a block; what the block gave."""
        self.job = job
        self.parked.release()
        self._wait()
        output, self.output = self.output, None
        return output

    def _wait(self) -> None:
        self.turn.acquire()
        if self.stopped:
            raise _Stopped

    def step(self, output: Any = None) -> None:
        """Let it go on with the output of its block until it parks again or ends; an error in it is raised here."""
        assert self.future is not None
        self.job, self.output = None, output
        self.turn.release()
        self.parked.acquire()
        if self.job is None:
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
        self._threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(max_workers=max(1, len(self.runs)), thread_name_prefix="batch")
        try:
            for run in self.runs:
                run.future = self._pool.submit(run.main)
                run.future.add_done_callback(lambda _, run=run: run.parked.release())  # type: ignore[misc]
            for run in self.runs:
                run.step()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        for run in self.runs:
            run.stopped = True
            run.turn.release()
        self._pool.shutdown()
        torch.set_num_threads(self._threads)  # the default of threads to come, which the batches' threads lowered
        for block, forward in self._forwards:
            if forward is None:
                del block.forward
            else:
                block.forward = forward

    def watch(self, block: int) -> Iterator[int]:
        """Every batch's number, each time before the block runs once for it; what it returns is dropped."""
        for number, run in enumerate(self.runs):
            job = self._job(run, block)
            yield number
            job.compute()

    def go_on(self, block: int) -> None:
        """Every batch runs the block as it is now and goes to the next one, or to the end."""
        for run in self.runs:
            run.step(self._job(run, block).compute())
            if run.job is None and block + 1 < len(self.blocks):
                raise InputError(
                    f"the model ended after block {block} of {len(self.blocks)}; it cannot be walked block by block"
                )

    def _job(self, run: _Run, block: int) -> _Job:
        if run.job is None or run.job.block != block:
            at = "the end" if run.job is None else run.job.block
            raise InputError(f"the model calls its blocks out of order: at {at}, expected {block}; it cannot be walked")
        return run.job


def _parking(number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
    def parked(*args: Any, **kwargs: Any) -> Any:
        run: _Run = _current.run
        return run.park(_Job(number, forward, args, kwargs))

    return parked
