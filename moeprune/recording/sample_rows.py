"""Which tokens are sampled, the projection of expert outputs, and the rows while they are being recorded.

The tokens of a domain are drawn without replacement from all that count, the same in every layer. There are at most
TOKENS over all domains, and fewer where a layer's rows would take more than LAYER_BYTES.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from moeprune.artifacts.sample import TokenSample
from moeprune.data.trajectories import Sequence, TokenSet

TOKENS = 3072  # a layer, in equal shares over the domains
DIMENSION = 64  # numbers an expert's output is projected to
LAYER_BYTES = 32 * 2**20
SEED = 0  # of the drawn tokens and of the projection

Stream = tuple[str, bool]  # (domain, whether the trajectory belongs to the even half): sums are kept apart by stream


def stream_of(sequence: Sequence) -> Stream:
    return sequence.domain, sequence.half == "even"


@dataclass(frozen=True)
class Draw:
    """Which tokens are sampled."""

    rows: Mapping[int, tuple[np.ndarray, np.ndarray]]  # piece -> (positions in it, rows in its stream's sample)
    size: Mapping[Stream, int]  # rows of every stream
    weight: Mapping[str, float]  # domain -> counted tokens a sampled one stands for


def drawn_tokens(tokens: TokenSet, num_experts: int, hidden: int) -> Draw:
    """The sample, whatever the order of the pieces. `num_experts` is the largest number in any layer."""
    domains = sorted({sequence.domain for sequence in tokens.sequences})
    row = num_experts * (min(DIMENSION, hidden) + 1) * 4
    most = max(1, min(TOKENS, LAYER_BYTES // row) // len(domains))
    rows: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    size: dict[Stream, int] = {}
    weight: dict[str, float] = {}
    for domain in domains:
        pieces = [index for index, sequence in enumerate(tokens.sequences) if sequence.domain == domain]
        pieces.sort(key=lambda i: (tokens.sequences[i].trajectory, tokens.sequences[i].ids.tobytes()))
        counted = [(i, int(position)) for i in pieces for position in np.flatnonzero(tokens.sequences[i].counted)]
        source = np.random.default_rng([SEED, zlib.crc32(domain.encode())])
        chosen = np.sort(source.choice(len(counted), size=min(most, len(counted)), replace=False))
        weight[domain] = len(counted) / len(chosen) if len(chosen) else 0.0
        for index in pieces:
            stream = stream_of(tokens.sequences[index])
            positions = [counted[number][1] for number in chosen if counted[number][0] == index]
            first = size.setdefault(stream, 0)
            size[stream] = first + len(positions)
            if positions:
                rows[index] = np.array(positions), np.arange(first, size[stream])
    return Draw(rows, size, weight)


def projection(hidden: int) -> np.ndarray:
    """A matrix (hidden, D) float32 with orthogonal columns that keeps squared lengths on average (Johnson and
    Lindenstrauss); the identity where the hidden size is at most DIMENSION."""
    if hidden <= DIMENSION:
        return np.eye(hidden, dtype=np.float32)
    gaussian = np.random.default_rng([SEED, hidden]).normal(size=(hidden, DIMENSION))
    basis, triangle = np.linalg.qr(gaussian)
    return (basis * np.sign(np.diagonal(triangle)) * np.sqrt(hidden / DIMENSION)).astype(np.float32)


class SampleRows:
    """The rows of one layer and stream while they are being recorded, on the CPU."""

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
