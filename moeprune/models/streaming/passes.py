"""Many forward passes side by side, one decoder layer after the other, so that every weight is read once."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from moeprune.models.memory import give_back_freed_memory, keep_one_heap
from moeprune.models.streaming.model import StreamedModel
from moeprune.models.streaming.suspended import Call, Suspended, suspending
from moeprune.models.streaming.waiting import (
    Border,
    NotResumable,
    Outline,
    Parked,
    blank,
    left_behind,
    outline,
    tensors_in,
)

FLOOR = 2**22  # bytes of waiting activations that may stay in memory however small a layer is


class StreamingError(RuntimeError):
    """The model does not call its decoder layers one after the other, each once; a layer-major pass would be wrong."""


class Waiting:
    """One forward pass between two decoder layers."""

    def __init__(self, forward: Callable[[], Any], scratch: Path, name: str) -> None:
        self.suspended, self.parked = Suspended(forward), Parked(scratch, name)
        self.call: Call | None = None  # of the decoder layer it waits for
        self.output: Any = None  # of the last decoder layer
        self.resident = 0  # bytes it holds in memory while it waits
        self.outlines: list[Outline] = []  # of what the layers before gave
        self.outputs: list[weakref.ref[torch.Tensor]] = []
        self.resumable = True

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What the next step is made from."""
        return list(tensors_in(self.output if self.call is None else (self.call.args, self.call.kwargs)))

    def remember(self, output: Any) -> None:
        try:
            self.outlines.append(outline(output))
        except NotResumable:
            self.resumable = False
        self.outputs = [*filter(lambda ref: ref() is not None, self.outputs), *map(weakref.ref, tensors_in(output))]


class LayerMajor:
    """The forward passes of one model on many batches; every decoder layer is in memory once, for all of them.

    with LayerMajor(streamed, forwards, scratch=folder) as passes:
        for position in passes.layers():  # this decoder layer is in memory now, and no other
            for number in range(len(forwards)):
                passes.advance(number)
        results = [passes.finish(number) for number in range(len(forwards))]

    It is the model's own forward that runs, so nothing about its family has to be known. Activations that wait beyond
    `memory` bytes (default: an eighth of a layer, at least FLOOR) wait in files in `scratch`.
    Raises StreamingError when the model calls its layers in another way than once each, in order.
    """

    def __init__(
        self,
        streamed: StreamedModel,
        forwards: Sequence[Callable[[], Any]],
        *,
        scratch: Path,
        memory: int | None = None,
    ) -> None:
        self._streamed, self._scratch = streamed, scratch
        self._memory = max(FLOOR, streamed.layer_bytes // 8) if memory is None else memory
        self._waiting = [Waiting(forward, scratch, f"waiting-{n}") for n, forward in enumerate(forwards)]
        self._layers = {id(streamed.model.get_submodule(name)): name for name in streamed.layers}
        self._stack = ExitStack()
        self._position, self._resident = 0, 0

    def __enter__(self) -> "LayerMajor":
        keep_one_heap()
        self._scratch.mkdir(parents=True, exist_ok=True)
        for left in self._scratch.glob("waiting-*.bin"):  # of a pass that was killed
            left.unlink()
        self._stack.callback(lambda: self._streamed.empty(self._streamed.names))
        self._stack.enter_context(suspending(self._forwards()))
        return self

    def _forwards(self) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
        """The modules at which passes stop, and how the driver computes them: those of the stem get weights before."""
        for name in [*self._streamed.layers, *self._streamed.stem]:
            module = self._streamed.model.get_submodule(name)
            yield module, partial(self._filled, module.forward, self._streamed.stem.get(name, []))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in self._waiting:
            one.suspended.close()
            one.call = one.output = None
            one.parked.close()
        self._stack.close()

    def layers(self, border: Border | None = None) -> Iterator[int]:
        """Positions of the decoder layers, from `border` on where there is one; each is in memory until the next one is
        asked for. Raises NotResumable when the passes cannot go on from the border."""
        streamed, layers = self._streamed, self._streamed.layers
        streamed.fill(streamed.containers)
        for number, one in enumerate(self._waiting):
            self._go_on(one, one.suspended.start, layers[0])
            if border is not None:
                self._skip(one, number, border)
            self._park(one)
        streamed.empty(name for names in streamed.stem.values() for name in names)
        give_back_freed_memory()
        for position in range(0 if border is None else border.position, len(layers)):
            self._position = position
            streamed.fill(streamed.names_in(layers[position]))
            give_back_freed_memory()
            if position + 1 < len(layers):
                streamed.read_ahead(streamed.names_in(layers[position + 1]))
            yield position
            streamed.empty(streamed.names_in(layers[position]))
            give_back_freed_memory()

    def advance(self, number: int) -> None:
        """Take one pass through the decoder layer that is in memory."""
        one, after = self._waiting[number], self._streamed.layers[self._position + 1 :]
        self._bring_back(one)
        assert one.call is not None, f"pass {number} has been through this layer"
        output, one.call = one.call.run(), None
        one.remember(output)
        if after:
            self._go_on(one, partial(one.suspended.answer, output), after[0])
        else:
            one.output = output
        del output
        self._park(one)

    def rehearse(self, number: int) -> None:
        """Run the decoder layer that is in memory for one pass and drop what it gives: the pass stays where it is."""
        one = self._waiting[number]
        self._bring_back(one)
        assert one.call is not None, f"pass {number} has been through this layer"
        one.call.run()
        self._park(one)

    def finish(self, number: int) -> Any:
        """What the forward pass returns, after the last layer. It can be asked for once."""
        one = self._waiting[number]
        self._bring_back(one)
        output, one.output = one.output, None
        call = self._until_layer(one, partial(one.suspended.answer, output))
        if call is not None:
            raise StreamingError(f"{self._layers[id(call.module)]} was called again after the last decoder layer")
        return one.suspended.take_result()

    def save(self, border: Border) -> bool:
        """Write where all passes are, between two layers; False when that would not be enough to go on from there."""
        for number, one in enumerate(self._waiting):
            self._bring_back(one)
            tensors = one.tensors
            enough = one.resumable and not left_behind(one.outputs, tensors)
            if enough:
                border.write(number, tensors, one.outlines)
            del tensors
            self._park(one)
            if not enough:
                return False
        return True

    def _skip(self, one: Waiting, number: int, border: Border) -> None:
        """Take a pass from the first layer to the border: layers give zeros, which what was kept replaces."""
        one.outlines = border.outlines(number)
        for outlined, name in zip(one.outlines, self._streamed.layers[1:]):
            self._go_on(one, partial(one.suspended.answer, blank(outlined, self._streamed.device)), name)
        border.refill(number, one.tensors)

    def _go_on(self, one: Waiting, step: Callable[[], Call | None], expected: str) -> None:
        """Run the pass up to its call of the next decoder layer."""
        one.call = self._until_layer(one, step)
        called = "no layer" if one.call is None else self._layers[id(one.call.module)]
        if called != expected:
            raise StreamingError(
                f"the model called {called} where {expected} was next; it cannot be streamed, set runtime.streaming=off"
            )

    def _until_layer(self, one: Waiting, step: Callable[[], Call | None]) -> Call | None:
        """The next call of a decoder layer; what the pass calls before it is answered here."""
        call = step()
        while call is not None and id(call.module) not in self._layers:
            call = one.suspended.answer(call.run())
        return call

    def _filled(self, forward: Callable[..., Any], weights: list[str], *args: Any, **kwargs: Any) -> Any:
        self._streamed.fill(weights)
        return forward(*args, **kwargs)

    def _park(self, one: Waiting) -> None:
        one.parked.follow(one.tensors)
        held = one.parked.held(self._streamed.addresses())
        size = sum(tensor.untyped_storage().nbytes() for tensor in held)
        if self._resident + size > self._memory:
            one.parked.put_away(held)
        else:
            one.resident = size
            self._resident += size

    def _bring_back(self, one: Waiting) -> None:
        one.parked.bring_back()
        self._resident -= one.resident
        one.resident = 0
