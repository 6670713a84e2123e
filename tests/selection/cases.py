"""Random selection problems and small statistics for the tests of the selection room."""

from itertools import combinations, product

import numpy as np

from moeprune.artifacts.sample import TokenSample
from moeprune.artifacts.statistics import SUMS, Layer, LayerStatistics, RoutingStatistics
from moeprune.selection.objective import Problem, Quadratic

KINDS = ("norms", "indefinite", "ties", "sparse", "zero diagonal", "groups", "linear term")


def random_problem(kind: str, experts: int, source: np.random.Generator) -> Problem:
    """A problem of one of the KINDS; groups have two groups of equal quota."""
    matrix = source.random((experts, experts))
    if kind == "indefinite":
        matrix = matrix - 0.5
    if kind == "ties":
        matrix = source.integers(-2, 3, (experts, experts)).astype(float)
    matrix = (matrix + matrix.T) / 2
    if kind == "sparse":
        mask = np.triu(source.random((experts, experts)) < 0.3)
        matrix = np.where(mask | mask.T, matrix, 0.0)
    if kind == "zero diagonal":
        np.fill_diagonal(matrix, 0.0)
        matrix = matrix - 0.4 * (matrix > 0)
    offset = source.normal(size=experts) if kind == "linear term" else None
    if kind == "groups":
        experts -= experts % 2
        matrix = matrix[:experts, :experts]
        quota = np.repeat(source.integers(1, experts // 2), 2)
        return Problem(Quadratic(matrix), np.arange(experts) * 2 // experts, quota)
    quota = np.array([source.integers(1, experts)])
    return Problem(Quadratic(matrix, offset), np.zeros(experts, dtype=int), quota)


def all_sets(problem: Problem) -> list[np.ndarray]:
    """Every feasible set (experts,) bool."""
    choices = [list(combinations(ids, int(count))) for ids, count in zip(problem.members(), problem.quota)]
    sets = []
    for parts in product(*choices):
        pruned = np.zeros(problem.size, dtype=bool)
        pruned[[expert for part in parts for expert in part]] = True
        if problem.feasible(pruned):
            sets.append(pruned)
    return sets


def brute_force(problem: Problem) -> float:
    """The cheapest cost over every feasible set, computed in one product."""
    sets = np.array(all_sets(problem), dtype=float)
    objective = problem.objective
    if objective.quadratic is None:
        return min(objective.cost(one > 0) for one in sets)
    linear = objective.linear
    assert linear is not None
    return float((np.einsum("si,ij,sj->s", sets, objective.quadratic, sets, optimize=True) + sets @ linear).min())


def layer_statistics(
    experts: int, tokens: int, top_k: int, seed: int, *, hidden: int = 3, even: bool = False
) -> LayerStatistics:
    """Sums accumulated token by token from random gates and outputs, by the definitions, and a random token sample."""
    source = np.random.default_rng(seed)
    popularity = source.random(experts) + 0.1
    size = np.exp(source.normal(size=experts))
    zeros = np.zeros
    sums = {
        "co_count": zeros((experts, experts), dtype=np.int64),
        "norm_product": zeros((experts, experts)),
        "output_product": zeros((experts, experts)),
        "gate_sum": zeros(experts),
        "norm_sum": zeros(experts),
        "norm_square_sum": zeros(experts),
        "gated_norm_sum": zeros(experts),
        "output_max": np.full(experts, -np.inf),
        "output_sum": zeros((experts, hidden)),
    }
    for _ in range(tokens):
        chosen = source.choice(experts, size=top_k, replace=False, p=popularity / popularity.sum())
        gate = source.random(top_k)
        gate /= gate.sum()
        outputs = source.normal(size=(top_k, hidden)) * size[chosen, None]
        norms = np.linalg.norm(outputs, axis=1)
        for a, i in enumerate(chosen):
            sums["gate_sum"][i] += gate[a]
            sums["norm_sum"][i] += norms[a]
            sums["norm_square_sum"][i] += norms[a] ** 2
            sums["gated_norm_sum"][i] += gate[a] * norms[a]
            sums["output_max"][i] = max(sums["output_max"][i], outputs[a].max())
            sums["output_sum"][i] += outputs[a]
            for b, j in enumerate(chosen):
                sums["co_count"][i, j] += 1
                sums["norm_product"][i, j] += gate[a] * norms[a] * gate[b] * norms[b]
                sums["output_product"][i, j] += gate[a] * gate[b] * (outputs[a] @ outputs[b])
    return LayerStatistics(tokens=np.int64(tokens), **sums, sample=_sample(experts, tokens, hidden, seed, even=even))


def _sample(experts: int, tokens: int, hidden: int, seed: int, *, even: bool) -> TokenSample:
    source, rows = np.random.default_rng([seed, 1]), 20
    logits = source.normal(size=(rows, experts)).astype(np.float32)
    outputs = source.normal(size=(rows, experts, hidden)).astype(np.float32)
    bias = np.zeros(experts, dtype=np.float32)
    return TokenSample(np.full(rows, tokens / rows), np.full(rows, even), logits, outputs, bias)


def silence(statistics: LayerStatistics, experts: list[int]) -> LayerStatistics:
    """The same sums as if these experts had never been routed."""
    values = {}
    for name in (*SUMS, "output_max"):
        value = getattr(statistics, name)
        value = np.array(value, copy=True)
        if value.ndim:
            value[experts] = -np.inf if name == "output_max" else 0
            if value.ndim == 2 and value.shape[0] == value.shape[1]:
                value[:, experts] = 0
        values[name] = value
    return LayerStatistics(**values, sample=statistics.sample)


def statistics_of(
    layers: list[Layer], domains: dict[str, list[LayerStatistics]], half: dict[str, list[LayerStatistics]] | None = None
) -> RoutingStatistics:
    manifest = {
        "key": "testkey",
        "model": {"fingerprint": "testmodel", "model_type": "qwen3_moe"},
        "domains": {domain: {} for domain in domains},
    }

    def by_name(group: dict[str, list[LayerStatistics]]) -> dict[str, dict[str, LayerStatistics]]:
        return {d: {layer.name: sums for layer, sums in zip(layers, values)} for d, values in group.items()}

    return RoutingStatistics(manifest, tuple(layers), by_name(domains), by_name(half or {}))


def small_statistics(*, experts: int = 8, top_k: int = 2, layers: int = 2, groups: int = 1) -> RoutingStatistics:
    """Two domains, with halves."""
    described = [
        Layer(
            f"model.layers.{i}.mlp",
            experts,
            top_k,
            groups,
            max(1, groups // 2),
            2 if groups > 1 else 1,
            scoring="softmax",
        )
        for i in range(layers)
    ]
    even = {
        d: [layer_statistics(experts, 150, top_k, 10 * n + i, even=True) for i in range(layers)]
        for n, d in enumerate("ab")
    }
    odd = {
        d: [layer_statistics(experts, 150, top_k, 77 + 10 * n + i) for i in range(layers)] for n, d in enumerate("ab")
    }
    whole = {d: [x + y for x, y in zip(even[d], odd[d])] for d in even}
    return statistics_of(described, whole, even)
