"""Sums over tokens, per layer: float64 and int64, kept off the model so that no `.to(bfloat16)` can touch them."""

from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch

from moeprune.artifacts.statistics import SUMS, Layer, LayerStatistics
from moeprune.recording.sample_rows import SampleRows

StatisticsChoice = Literal["default", "all", "samples"]


class LayerSums:
    """The running statistics of one layer (arXiv:2609.18916 for the pair sums); `add` takes one batch.

    Everything follows from the gates g and the Gram matrix of a token's k expert outputs: its diagonal is n^2.
    """

    def __init__(
        self,
        layer: Layer,
        *,
        device: torch.device,
        hidden: int,
        statistics: StatisticsChoice = "default",
        sample: SampleRows | None = None,
    ) -> None:
        experts = layer.num_experts
        self.num_experts, self.sample = experts, sample
        self.bins = experts + int(layer.null_slots)  # the last one takes slots that go to no expert, and is left out

        def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.tokens, self.null_slots = zeros(dtype=torch.int64), zeros(dtype=torch.int64)
        self.co_count = zeros(experts * experts, dtype=torch.int64)
        self.norm_product = zeros(experts * experts)
        self.output_product = zeros(experts * experts)
        self.gate_sum, self.norm_sum, self.norm_square_sum = zeros(experts), zeros(experts), zeros(experts)
        self.gated_norm_sum = zeros(experts)
        self.output_max = torch.full((self.bins,), -torch.inf, dtype=torch.float64, device=device)
        self.output_sum = None if statistics == "default" else zeros(self.bins, hidden)

    def add(
        self, index: torch.Tensor, gates: torch.Tensor, outputs: torch.Tensor, counted: torch.Tensor | None
    ) -> None:
        """Add one batch.

        index (tokens, k) expert ids, gates (tokens, k), outputs (tokens, k, hidden) before the gate, counted (tokens,)
        bool or None when every token counts.
        """
        outputs = outputs.float()
        gram = torch.bmm(outputs, outputs.transpose(1, 2))  # (tokens, k, k)
        peaks = outputs.amax(-1)  # (tokens, k)
        if counted is not None:
            index, gates, gram, peaks = index[counted], gates[counted], gram[counted], peaks[counted]
        if self.output_sum is not None:
            kept = outputs if counted is None else outputs[counted]
            self.output_sum.index_add_(0, index.reshape(-1), kept.reshape(-1, kept.shape[-1]).double())
        self.tokens += index.shape[0]
        self.null_slots += (index == self.num_experts).sum()
        self._add_singles(index, gates, gram, peaks)
        self._add_pairs(index, gates, gram)

    def _add_singles(self, index: torch.Tensor, gates: torch.Tensor, gram: torch.Tensor, peaks: torch.Tensor) -> None:
        flat, gate = index.reshape(-1), gates.double().reshape(-1)
        square = gram.diagonal(dim1=1, dim2=2).reshape(-1)
        norm = square.sqrt().double()
        for total, values in (
            (self.gate_sum, gate),
            (self.norm_sum, norm),
            (self.norm_square_sum, square.double()),
            (self.gated_norm_sum, gate * norm),
        ):
            total += torch.bincount(flat, weights=values, minlength=self.bins)[: self.num_experts]
        self.output_max.scatter_reduce_(0, flat, peaks.double().reshape(-1), "amax")

    def _add_pairs(self, index: torch.Tensor, gates: torch.Tensor, gram: torch.Tensor) -> None:
        pairs = (index.unsqueeze(2) * self.bins + index.unsqueeze(1)).reshape(-1)
        gated_norm = gates.double() * gram.diagonal(dim1=1, dim2=2).sqrt().double()  # (tokens, k)
        gate_product = gates.double().unsqueeze(2) * gates.double().unsqueeze(1)
        norms = gated_norm.unsqueeze(2) * gated_norm.unsqueeze(1)
        self.co_count += self._by_pair(pairs, None)
        self.norm_product += self._by_pair(pairs, norms)
        self.output_product += self._by_pair(pairs, gate_product * gram)

    def _by_pair(self, pairs: torch.Tensor, values: torch.Tensor | None) -> torch.Tensor:
        """Sums over slot pairs, for every pair of experts (experts * experts,)."""
        weights = None if values is None else values.reshape(-1)
        sums = torch.bincount(pairs, weights=weights, minlength=self.bins * self.bins)
        if self.bins == self.num_experts:
            return sums
        return sums.view(self.bins, self.bins)[: self.num_experts, : self.num_experts].reshape(-1)

    def state(self) -> dict[str, torch.Tensor]:
        """Name -> tensor of every sum, on the CPU; `restore` takes it back."""
        return {name: value.cpu() for name, value in self._tensors().items()}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        tensors = self._tensors()
        for name, value in state.items():
            tensors[name].copy_(value)

    def _tensors(self) -> dict[str, torch.Tensor]:
        names = (*SUMS, "output_max", *(["null_slots"] if self.bins > self.num_experts else []))
        sums = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return sums if self.sample is None else sums | {f"sample/{k}": v for k, v in self.sample.tensors().items()}

    def statistics(self) -> LayerStatistics:
        square = (self.num_experts, self.num_experts)
        state = self.state()
        arrays = {name: np.array(state[name].numpy()) for name in (*SUMS, "output_max") if name in state}
        for name in {"output_max", "output_sum"} & set(arrays):
            arrays[name] = arrays[name][: self.num_experts]
        for name in ("co_count", "norm_product", "output_product"):
            arrays[name] = arrays[name].reshape(square)
        # The two triangles were summed in different orders; the smallest rounding difference would break symmetry.
        for name in ("norm_product", "output_product"):
            arrays[name] = (arrays[name] + arrays[name].T) / 2
        return LayerStatistics(**arrays, sample=None if self.sample is None else self.sample.sample())
