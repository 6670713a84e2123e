"""Plans and token sets that several tests of this room use."""

import hashlib
from collections.abc import Sequence as Items
from typing import Any

import numpy as np

from moeprune.artifacts.plan import LayerPlan, PrunePlan
from moeprune.data.trajectories import Sequence, TokenSet
from moeprune.models.layers import find_moe_layers, model_fingerprint


def random_plan(model: Any, kept: int, *, seed: int = 0) -> PrunePlan:
    """A plan that keeps `kept` random experts of every layer."""
    generator, layers = np.random.default_rng(seed), find_moe_layers(model)
    return PrunePlan(
        model_type=model.config.model_type,
        model_fingerprint=model_fingerprint(model, layers),
        statistics_key="",
        criterion={},
        solver={},
        budget={},
        mix={},
        layers=tuple(
            LayerPlan(
                name=layer.name,
                num_experts=layer.info.num_experts,
                top_k=layer.info.top_k,
                kept=tuple(sorted(generator.choice(layer.info.num_experts, kept, replace=False).tolist())),
            )
            for layer in layers
        ),
    )


def piece(
    ids: Any, *, domain: str = "d", trajectory: str | None = None, counted: Items[bool] | None = None
) -> Sequence:
    """A piece; without a name its trajectory is named by its own ids."""
    array = np.asarray(ids, dtype=np.int32)
    name = trajectory or hashlib.sha256(array.astype("<i8").tobytes()).hexdigest()
    mask = np.ones(len(array), dtype=bool) if counted is None else np.asarray(counted, dtype=bool)
    return Sequence(array, mask, domain, name)


def random_tokens(lengths: Items[int], *, domains: Items[str] = ("d",), seed: int = 0) -> TokenSet:
    """One piece a length, ids 10..99, the domains in turn."""
    generator = np.random.default_rng(seed)
    pieces = [
        piece(generator.integers(10, 100, length), domain=domains[index % len(domains)])
        for index, length in enumerate(lengths)
    ]
    return TokenSet(tuple(pieces), {})
