"""Forward passes that stop wherever they need something, so that many can be under way and one moves at a time."""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn

from moeprune.models.layers import forward_replaced


class _Abandoned(BaseException):
    """Raised inside a forward pass that nobody will go on with; it unwinds and its thread ends."""


_NO_ANSWER = object()
_thread = threading.local()  # .suspended: the forward pass that runs in this thread


class Call:
    """One call of a module that a forward pass waits for."""

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.module, self._forward, self.args, self.kwargs = module, forward, args, kwargs

    def run(self) -> Any:
        with torch.no_grad():
            return self._forward(*self.args, **self.kwargs)


class Suspended:
    """A forward pass in a thread of its own that runs only while its driver waits for it.

    So nothing happens at the same time, and what the model's code keeps between two calls (masks, position embeddings,
    state that one layer leaves for another) stays where it is without anybody having to know it. The calls themselves
    are run by the driver, in its thread.
    """

    def __init__(self, forward: Callable[[], Any]) -> None:
        self._forward = forward
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._done: Future[Any] | None = None

    def start(self) -> Call | None:
        """Run until the first call; None when the forward pass ended without one."""
        self._done = self._pool.submit(self._run)
        self._done.add_done_callback(lambda _: self._calls.put(None))
        return self._next()

    def answer(self, output: Any) -> Call | None:
        """Give the call it waits for its output and run until the next one; None at the end."""
        self._answers.put(output)
        return self._next()

    def _next(self) -> Call | None:
        call = self._calls.get()
        if call is None and self._done is not None and self._done.exception() is not None:
            self._done.result()  # raises what the forward pass raised
        return call

    def take_result(self) -> Any:
        """What the forward pass, which has ended, returned; it is kept no longer."""
        assert self._done is not None
        result, self._done = self._done.result(), None
        self.close()
        return result

    def ask(self, call: Call) -> Any:
        """The output of the call, from the driver. Runs in the forward pass's own thread."""
        self._calls.put(call)
        del call
        answer = self._answers.get()
        if answer is _NO_ANSWER:
            raise _Abandoned
        return answer

    def _run(self) -> Any:
        # Both are settings of each thread. What runs here is small; more threads would each keep helpers of their own.
        torch.set_num_threads(1)
        _thread.suspended = self
        try:
            with torch.no_grad():
                return self._forward()
        except _Abandoned:  # its traceback would keep all that the pass held
            return None

    def close(self) -> None:
        """End the thread, wherever the forward pass is."""
        self._answers.put(_NO_ANSWER)
        self._pool.shutdown(wait=True)


@contextmanager
def suspending(forwards: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Inside, suspended passes stop at their calls of these modules, which the driver computes by these forwards."""
    with ExitStack() as stack:
        # A thread's setting is what threads to come begin with, and the passes have lowered theirs.
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        for module, forward in forwards:
            stack.enter_context(forward_replaced(module, partial(_called, module, forward)))
        yield


def _called(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    suspended: Suspended | None = getattr(_thread, "suspended", None)
    if suspended is None:  # the driver itself
        return forward(*args, **kwargs)
    return suspended.ask(Call(module, forward, args, kwargs))
