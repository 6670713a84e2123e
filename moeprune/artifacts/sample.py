"""A sample of tokens of one layer with what every expert would have put out for them, and the router's rule to replay.

Every other statistic only knows the experts that a token was routed to. With these rows the output of the block can be
computed for any set of experts, because it is known where each token would go instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np


@dataclass(frozen=True)
class TokenSample:
    """Sampled tokens of one layer (E experts). Outputs are before the gate, all projected by one matrix to D numbers
    that keep lengths and angles on average; where D is the hidden size they are the outputs themselves."""

    weight: np.ndarray  # (tokens,) float64: counted tokens that this one stands for
    even: np.ndarray  # (tokens,) bool: of the even half of the trajectories
    logits: np.ndarray  # (tokens, E) float32: the router's projection
    outputs: np.ndarray  # (tokens, E, D) float32
    bias: np.ndarray  # (E,) float32: added to scores when experts are chosen; 0 in most families

    def part(self, rows: np.ndarray) -> "TokenSample":
        """The tokens where `rows` (tokens,) is True."""
        return TokenSample(**{name: getattr(self, name)[rows] for name in ROWS}, bias=self.bias)


ROWS = ("weight", "even", "logits", "outputs")  # fields with one row a token
FIELDS = tuple(f.name for f in fields(TokenSample))


def joined(samples: Sequence[TokenSample | None], weights: Sequence[float]) -> TokenSample | None:
    """All tokens of several samples, each sample's weights multiplied; None where one of them is missing."""
    present = [sample for sample in samples if sample is not None]
    if len(present) < len(samples):
        return None
    rows = {name: np.concatenate([getattr(sample, name) for sample in present]) for name in ROWS}
    rows["weight"] = np.concatenate([sample.weight * weight for sample, weight in zip(present, weights)])
    filled = next((sample for sample in present if len(sample.weight)), present[0])  # an empty one never saw the bias
    return TokenSample(**rows, bias=filled.bias)
