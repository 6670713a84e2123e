"""Interaction matrices like those of trained routers, and harder ones, made from simulated routing."""

from dataclasses import dataclass

import numpy as np

from moeprune.artifacts.statistics import LayerStatistics
from moeprune.selection.criteria.hope import interaction

KINDS = ("clusters", "hubs", "dead", "ties", "stress")


@dataclass(frozen=True)
class Router:
    """A simulated router: topics with favourite experts, popularity, output sizes, dead experts."""

    logits: np.ndarray  # (topics, experts)
    norms: np.ndarray  # (experts,)
    top_k: int

    def record(self, tokens: int, source: np.random.Generator) -> LayerStatistics:
        """The sums a recording of so many tokens would give; those that F does not use are left at 0."""
        experts = len(self.norms)
        together, products = np.zeros((experts, experts), dtype=np.int64), np.zeros((experts, experts))
        gated = np.zeros(experts)
        for start in range(0, tokens, 2000):
            batch = min(2000, tokens - start)
            scores = self.logits[source.integers(len(self.logits), size=batch)] + source.gumbel(size=(batch, experts))
            chosen = np.argpartition(-scores, self.top_k - 1, axis=1)[:, : self.top_k]
            gates = np.exp(np.take_along_axis(scores, chosen, axis=1) / 3)
            gates /= gates.sum(axis=1, keepdims=True)
            sizes = gates * self.norms[chosen] * np.exp(0.3 * source.normal(size=gates.shape))
            dense = np.zeros((batch, experts))
            np.put_along_axis(dense, chosen, sizes, axis=1)
            hit = (dense > 0).astype(np.int64)
            together += hit.T @ hit
            products += dense.T @ dense
            gated += dense.sum(axis=0)
        nothing = np.zeros(experts)
        return LayerStatistics(
            tokens=np.int64(tokens),
            co_count=together,
            norm_product=products,
            output_product=np.zeros((experts, experts)),
            gate_sum=nothing,
            norm_sum=nothing,
            norm_square_sum=nothing,
            gated_norm_sum=gated,
            output_max=nothing,
        )


def router(kind: str, experts: int, source: np.random.Generator) -> Router:
    """A router of one kind: topic clusters, a few hubs that fire with everybody, or an eighth of dead experts."""
    topics = max(2, experts // 12)
    # Balanced, as trained with a load-balancing loss: what differs is with whom an expert fires, not how often.
    logits = 0.3 * source.normal(size=(1, experts)) + 3.0 * (source.random((topics, experts)) < 0.15)
    norms = np.exp(0.15 * source.normal(size=experts))
    if kind == "hubs":
        hubs = source.choice(experts, max(1, experts // 16), replace=False)
        logits[:, hubs] += 3.0
        norms[hubs] *= 3.0
    if kind == "dead":
        logits[:, source.choice(experts, experts // 8, replace=False)] = -1e9
    return Router(logits, norms, top_k=2 if experts <= 16 else 8 if experts >= 64 else 4)


def matrix(kind: str, experts: int, *, normalise: str, seed: int) -> np.ndarray:
    """F (experts, experts). "ties" has every expert twice; "stress" is symmetric noise of both signs, no router."""
    source = np.random.default_rng([seed, experts, KINDS.index(kind)])
    if kind == "stress":
        noise = source.normal(size=(experts, experts))
        return noise + noise.T
    if kind == "ties":
        half = router("clusters", experts // 2, source).record(20_000, source)
        single = interaction(half, product="norms", normalise=normalise)  # type: ignore[arg-type]
        return np.kron(single, np.ones((2, 2)))
    sums = router(kind, experts, source).record(20_000, source)
    return interaction(sums, product="norms", normalise=normalise)  # type: ignore[arg-type]
