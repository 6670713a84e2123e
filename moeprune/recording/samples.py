"""What every expert, routed to or not, puts out for a sample of tokens (recording.sample_rows), randomly projected."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.routing import affinities, choices, routed
from moeprune.data.trajectories import TokenSet
from moeprune.models.layers import MoELayer, choice_bias
from moeprune.recording.checks import TOLERANCE, RecordingError
from moeprune.recording.hooks import CHUNK_BYTES, in_hidden_size, slot_outputs, unobserved
from moeprune.recording.sample_rows import SampleRows, drawn_tokens, projection

CHUNK_BYTES_ELSEWHERE = 2**28  # of expert outputs held at a time on other devices than the CPU


class Sampler:
    """Fills the rows of the running batch.

    Raises InputError when a layer's routing rule cannot be replayed.
    """

    def __init__(self, layers: Sequence[MoELayer], tokens: TokenSet, hidden: int, device: torch.device) -> None:
        for layer in layers:
            if not layer.info.scoring or layer.info.gates_input:
                raise InputError(
                    f"{layer.name}: the routing of {layer.family.model_type} ({layer.info.routing or 'unknown'}) "
                    "cannot be replayed; record with calibration.statistics=default, and choose another criterion than "
                    "reroute"
                )
        self._hidden = hidden
        self.draw = drawn_tokens(tokens, max(layer.info.num_experts for layer in layers), hidden)
        self._projection = torch.from_numpy(projection(hidden)).to(device)

    def new_rows(self, layer: MoELayer, domain: str, *, even: bool) -> SampleRows:
        size, weight = self.draw.size.get((domain, even), 0), self.draw.weight.get(domain, 0.0)
        return SampleRows(layer.info.num_experts, self._hidden, size=size, weight=weight, even=even)

    @contextmanager
    def batch(
        self, batch: Sequence[int], length: int, layers: Sequence[MoELayer], rows: Mapping[str, SampleRows]
    ) -> Iterator[None]:
        """Inside, these pieces, padded to `length`, go through the layers; `rows` by layer name take the sample."""
        sampled = [(number, *self.draw.rows[index]) for number, index in enumerate(batch) if index in self.draw.rows]
        if not sampled:
            yield
            return
        places = torch.from_numpy(np.concatenate([number * length + positions for number, positions, _ in sampled]))
        targets = torch.from_numpy(np.concatenate([targets for _, _, targets in sampled]))
        with ExitStack() as stack:
            for layer in layers:
                stack.enter_context(self._listening(layer, rows[layer.name], places, targets))
            yield

    @contextmanager
    def _listening(
        self, layer: MoELayer, rows: SampleRows, places: torch.Tensor, targets: torch.Tensor
    ) -> Iterator[None]:
        """Inside, the first call of the layer's router and experts fills the rows; a check may call them again."""
        router_logits: list[torch.Tensor] = []
        calls: list[int] = []

        def router_called(module: torch.nn.Module, args: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
            router_logits.append(output[0])

        def experts_called(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            calls.append(1)
            if len(calls) == 1:
                logits = router_logits[0]
                self._fill(rows, layer, logits[places.to(logits.device)], args, places, targets)

        handles = [layer.router.register_forward_hook(router_called)]
        handles.append(layer.experts.register_forward_pre_hook(experts_called))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _fill(
        self,
        rows: SampleRows,
        layer: MoELayer,
        logits: torch.Tensor,
        call: tuple[torch.Tensor, ...],
        places: torch.Tensor,
        targets: torch.Tensor,
    ) -> None:
        """Logits and outputs of all experts for the tokens at `places` of one call of the experts.

        Raises RecordingError when the rule that will be replayed is not the one the model follows.
        """
        hidden, _, gates = call
        places = places.to(hidden.device)
        bias = choice_bias(layer)
        if bias is not None:
            rows.bias.copy_(bias)
        rows.logits[targets] = logits.float().cpu()
        _check_rule(layer, rows.logits[targets], rows.bias, gates[places], hidden.dtype)
        rows.outputs[targets] = self._all_outputs(layer, hidden[places])

    def _all_outputs(self, layer: MoELayer, hidden: torch.Tensor) -> torch.Tensor:
        """Projected outputs of all experts (tokens, experts, D), on the CPU."""
        experts = layer.info.num_experts
        limit = CHUNK_BYTES if hidden.device.type == "cpu" else CHUNK_BYTES_ELSEWHERE
        step = max(1, limit // (experts * hidden.shape[1] * hidden.element_size()))
        index = torch.arange(experts, device=hidden.device)
        projected = []
        for chunk in hidden.split(step):
            every = index.expand(len(chunk), -1)
            outputs = in_hidden_size(layer, slot_outputs(layer, unobserved(layer), chunk, every))
            projected.append((outputs.float() @ self._projection.to(outputs.device)).cpu())
        outputs = torch.cat(projected)
        if not bool(torch.isfinite(outputs).all()):
            raise RecordingError(f"{layer.name}: an expert's output is not finite for a sampled token; check the dtype")
        return outputs


def _check_rule(
    layer: MoELayer, logits: torch.Tensor, bias: torch.Tensor, gates: torch.Tensor, dtype: torch.dtype
) -> None:
    """The replayed gates are the recorded ones. Slots are compared in order of size: ties may fall either way."""
    info, values = layer.info, logits.numpy()
    everyone = np.ones(info.num_experts, dtype=bool)
    _, replayed = routed(info, affinities(info, values), choices(info, values, bias.numpy()), everyone)
    recorded = gates.double().cpu().numpy()
    difference = float(np.abs(np.sort(replayed, axis=1) - np.sort(recorded, axis=1)).max())
    if not difference <= TOLERANCE[dtype] * max(float(np.abs(recorded).max()), 1e-30):
        raise RecordingError(
            f"{layer.name}: replaying the rule {info.routing!r} gives gates that differ from the model's by "
            f"{difference:.3g}; record with calibration.statistics=default and report it"
        )
