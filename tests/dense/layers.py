"""Small layers with correlated inputs, the kind that makes second-order methods differ from the others."""

import torch

from moeprune.dense.methods.inputs import InputStatistics


def layer(rows=24, columns=256, tokens=600, *, seed=0, dead=()):
    """A weight (rows, columns) and the statistics of correlated inputs with a few loud channels."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.eye(columns) + torch.randn(columns, columns, generator=generator) / columns**0.5
    inputs = torch.randn(tokens, columns, generator=generator) @ mix
    inputs *= torch.exp(torch.randn(columns, generator=generator) * 0.7)
    inputs[:, list(dead)] = 0
    weight = torch.randn(rows, columns, generator=generator)
    statistics = InputStatistics("layer", columns)
    statistics.add(inputs)
    return weight, statistics, inputs
