"""Hooks that feed the statistics of one block's weights while the block runs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from moeprune.artifacts.errors import InputError
from moeprune.dense.experts import FusedExperts, require_rebuilt, routed_rows
from moeprune.dense.methods.inputs import InputStatistics
from moeprune.dense.methods.kinds import Needs
from moeprune.dense.weights import Weight
from moeprune.models.layers import forward_replaced

Places = Callable[[int], str]  # position among the batch's tokens -> what a message calls it


class Observer:
    """Statistics of some weights of one block, filled batch by batch; padding and uncounted tokens never enter."""

    def __init__(
        self, weights: Sequence[Weight], experts: Sequence[FusedExperts], needs: Needs, *, tied: Mapping[Weight, Weight]
    ) -> None:
        self.weights, self.experts, self.needs, self.tied = weights, experts, needs, tied
        self.statistics: dict[str, InputStatistics] = {}
        self._counted: torch.Tensor | None = None
        self._shape: tuple[int, ...] = ()
        self._places: Places = str
        self._inputs: list[tuple[torch.Tensor, InputStatistics]] = []  # of this batch, alive so that identity is sound
        self._rebuilt: set[str] = set()

    def open_batch(self, counted: torch.Tensor, places: Places) -> None:
        """Announce the batch that runs next: counted (batch, length) bool."""
        self._shape = tuple(counted.shape)
        self._counted = None if bool(counted.all()) else counted
        self._places = places
        self._inputs.clear()

    def take(self, weight: Weight) -> InputStatistics:
        """The statistics of a weight under its own name, given up here; empty ones when no token reached it."""
        statistics = self.statistics.pop(weight.name, None)
        if statistics is None:
            return InputStatistics(weight.name, weight.shape[1], "nothing")
        return statistics.called(weight.name)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, every call of the block's modules adds to the statistics."""
        routed: dict[int, list[Weight]] = {}
        with ExitStack() as stack:
            stack.callback(self._inputs.clear)
            for weight in (*self.weights, *self.tied):
                if weight.expert is None:
                    hook = self._linear(self.tied.get(weight, weight))
                    stack.callback(weight.module.register_forward_pre_hook(hook, with_kwargs=True).remove)
                else:
                    routed.setdefault(id(weight.module), []).append(weight)
            for fused in self.experts:
                if id(fused.module) in routed:
                    forward = self._routed(fused, routed[id(fused.module)], fused.module.forward)
                    stack.enter_context(forward_replaced(fused.module, forward))
            yield

    def _linear(self, weight: Weight) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs = args[0] if args else kwargs["input"]
            own = self.statistics.get(weight.name)
            for seen, shared in self._inputs:
                if seen is inputs and own in (None, shared):  # query, key and value read the very same tensor
                    self.statistics[weight.name] = shared
                    return
            statistics = own or self._new(weight)
            statistics.add(self._rows(weight, inputs), source=self._row_place)
            self._inputs.append((inputs, statistics))

        return hook

    def _rows(self, weight: Weight, inputs: torch.Tensor) -> torch.Tensor:
        """The counted rows (tokens, in) of a linear's input."""
        if self._counted is None:
            return inputs.reshape(-1, inputs.shape[-1])
        heads_first = (
            inputs.ndim == 4 and (inputs.shape[0], inputs.shape[2]) == self._shape
        )  # (batch, heads, length, in)
        if tuple(inputs.shape[:2]) == self._shape and not heads_first:
            return inputs[self._counted].reshape(-1, inputs.shape[-1])
        if heads_first and inputs.shape[1] != inputs.shape[2]:
            return inputs.transpose(1, 2)[self._counted].reshape(-1, inputs.shape[-1])
        if inputs.ndim == 2 and inputs.shape[0] == self._counted.numel():
            return inputs[self._counted.flatten()]
        raise InputError(
            f"{weight.name}: its inputs {list(inputs.shape)} cannot be matched to tokens {list(self._shape)}, so "
            "padding cannot be left out; leave this module out of targets, or calibrate one sequence a batch"
        )

    def _routed(self, fused: FusedExperts, weights: list[Weight], forward: Callable[..., Any]) -> Callable[..., Any]:
        up = {weight.expert: weight for weight in weights if weight.part == fused.up}
        down = {weight.expert: weight for weight in weights if weight.part != fused.up}

        def watched(hidden: torch.Tensor, index: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
            def visit(expert: int, rows: torch.Tensor, tokens: torch.Tensor) -> None:
                def place(row: int) -> str:
                    return self._places(int(tokens[row]))

                if expert in up:
                    self._of(up[expert]).add(rows, source=place)
                if expert in down:
                    self._of(down[expert]).add(fused.middle(expert, rows), source=place)

            counted = None if self._counted is None else self._counted.flatten()
            routed_rows(hidden, index, gates, counted, visit)
            output = forward(hidden, index, gates)
            if fused.name not in self._rebuilt:  # once a block
                require_rebuilt(fused, hidden, index, gates, output)
                self._rebuilt.add(fused.name)
            return output

        return watched

    def _row_place(self, row: int) -> str:
        """The place of a row among the counted ones."""
        if self._counted is None:
            return self._places(row)
        return self._places(int(self._counted.flatten().nonzero()[row]))

    def _of(self, weight: Weight) -> InputStatistics:
        return self.statistics.get(weight.name) or self._new(weight)

    def _new(self, weight: Weight) -> InputStatistics:
        statistics = InputStatistics(weight.name, weight.shape[1], self.needs, weight.parameter.device)
        self.statistics[weight.name] = statistics
        return statistics
