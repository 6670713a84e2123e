"""All batches walk through a model in memory block by block, each in its own run of the model's own forward.

    with Turns(blocks, [lambda: model(**first), lambda: model(**second)]) as turns:
        for block in range(len(blocks)):
            for batch in turns.watch(block): ...     # the block has run for this batch, its output is dropped
            ...                                      # change the block's weights here
            turns.go_on(block)                       # the block runs again, and its output is what the next one gets

Masks, position embeddings, caches and whatever else a family hands to its layers are the model's own, and nothing here
knows a family. The hidden states of all batches are kept from block to block.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any

from torch import nn

from moeprune.artifacts.errors import InputError
from moeprune.models.streaming.suspended import Call, Suspended, suspending


class Turns:
    """Runs of the model that stop in front of every block. Blocks are modules that each run calls once, in order."""

    def __init__(self, blocks: Sequence[nn.Module], runs: Sequence[Callable[[], Any]]) -> None:
        self._blocks, self._runs = blocks, [Suspended(run) for run in runs]
        self._positions = {id(block): position for position, block in enumerate(blocks)}
        self._calls: list[Call | None] = [None] * len(runs)  # of the block that each run waits for

    def __enter__(self) -> "Turns":
        with ExitStack() as stack:
            stack.enter_context(suspending((block, block.forward) for block in self._blocks))
            for run in self._runs:
                stack.callback(run.close)
            self._calls = [run.start() for run in self._runs]
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls = []
        self._stack.close()

    def watch(self, block: int) -> Iterator[int]:
        """Every batch's number, each time before the block runs once for it; what it returns is dropped."""
        for number in range(len(self._runs)):
            call = self._call(number, block)
            yield number
            call.run()

    def go_on(self, block: int) -> None:
        """Every batch runs the block as it is now and goes to the next one, or to the end."""
        for number, run in enumerate(self._runs):
            step = partial(run.answer, self._call(number, block).run())
            self._calls[number] = None  # its inputs are not held while the run goes on
            self._calls[number] = step()
            if self._calls[number] is None and block + 1 < len(self._blocks):
                raise InputError(
                    f"the model ended after block {block} of {len(self._blocks)}; it cannot be walked block by block"
                )

    def _call(self, number: int, block: int) -> Call:
        call = self._calls[number]
        at = "the end" if call is None else self._positions[id(call.module)]
        if call is None or at != block:
            raise InputError(f"the model calls its blocks out of order: at {at}, expected {block}; it cannot be walked")
        return call
