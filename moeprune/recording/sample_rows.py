"""Which tokens are sampled, what expert outputs are projected by, and where the rows lie while they are recorded.

The tokens of a domain are drawn without replacement from all that count, the same in every layer. There are at most
TOKENS over all domains, and fewer where a layer's rows would take more than LAYER_BYTES.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from moeprune.artifacts.sample import TokenSample
from moeprune.data.trajectories import TokenSet

TOKENS = 3072  # a layer, in equal parts over the domains
DIMENSION = 64  # numbers an expert's output is projected to
LAYER_BYTES = 32 * 2**20
SEED = 0  # of the drawn tokens and of the projection

Group = tuple[str, bool]  # (domain, even half)


@dataclass(frozen=True)
class Drawn:
    """Which tokens are sampled."""

    rows: Mapping[int, tuple[np.ndarray, np.ndarray]]  # piece -> (positions in it, rows in its group's sample)
    size: Mapping[Group, int]  # rows of every group
    weight: Mapping[str, float]  # domain -> counted tokens a sampled one stands for


def drawn_tokens(tokens: TokenSet, num_experts: int, hidden: int) -> Drawn:
    """The sample, whatever the order of the pieces. `num_experts` is the largest number in any layer."""
    domains = sorted({sequence.domain for sequence in tokens.sequences})
    row = num_experts * (min(DIMENSION, hidden) + 1) * 4
    most = max(1, min(TOKENS, LAYER_BYTES // row) // len(domains))
    rows: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    size: dict[Group, int] = {}
    weight: dict[str, float] = {}
    for domain in domains:
        its = [index for index, sequence in enumerate(tokens.sequences) if sequence.domain == domain]
        its.sort(key=lambda i: (tokens.sequences[i].trajectory, tokens.sequences[i].ids.tobytes()))
        places = [(i, int(position)) for i in its for position in np.flatnonzero(tokens.sequences[i].counted)]
        source = np.random.default_rng([SEED, zlib.crc32(domain.encode())])
        chosen = np.sort(source.choice(len(places), size=min(most, len(places)), replace=False))
        weight[domain] = len(places) / len(chosen) if len(chosen) else 0.0
        for index in its:
            group = domain, tokens.sequences[index].half == "even"
            positions = [places[number][1] for number in chosen if places[number][0] == index]
            first = size.setdefault(group, 0)
            size[group] = first + len(positions)
            if positions:
                rows[index] = np.array(positions), np.arange(first, size[group])
    return Drawn(rows, size, weight)


def projection(hidden: int) -> np.ndarray:
    """A matrix (hidden, D) float32 with orthogonal columns that keeps squared lengths on average (Johnson and
    Lindenstrauss); the identity where the hidden size is at most DIMENSION."""
    if hidden <= DIMENSION:
        return np.eye(hidden, dtype=np.float32)
    gaussian = np.random.default_rng([SEED, hidden]).normal(size=(hidden, DIMENSION))
    basis, triangle = np.linalg.qr(gaussian)
    return (basis * np.sign(np.diagonal(triangle)) * np.sqrt(hidden / DIMENSION)).astype(np.float32)


class SampleRows:
    """The rows of one layer and group while they are being recorded, on the CPU."""

    def __init__(self, num_experts: int, hidden: int, *, size: int, weight: float, even: bool) -> None:
        self.weight, self.even = weight, even
        self.logits = torch.zeros(size, num_experts)
        self.outputs = torch.zeros(size, num_experts, min(hidden, DIMENSION))
        self.bias = torch.zeros(num_experts)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"logits": self.logits, "outputs": self.outputs, "bias": self.bias}

    def sample(self) -> TokenSample:
        size = len(self.logits)
        arrays = {name: np.array(value.numpy()) for name, value in self.tensors().items()}
        return TokenSample(weight=np.full(size, self.weight), even=np.full(size, self.even), **arrays)
