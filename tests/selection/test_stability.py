"""Stability from split halves, and what shrinkage does to rare pairs."""

from dataclasses import replace

import numpy as np
import pytest

from moeprune.artifacts.statistics import LayerStatistics, RoutingStatistics
from moeprune.selection.criteria.criterion import balanced
from moeprune.selection.criteria.hope import interaction
from moeprune.selection.options import SelectionOptions
from moeprune.selection.select import select
from tests.selection.cases import layer_statistics, silence, small_statistics


def test_halves_that_are_alike_agree_without_regret() -> None:
    statistics = small_statistics()
    alike = replace(statistics, domains={d: {n: s + s for n, s in ls.items()} for d, ls in statistics.half.items()})
    for layer in select(alike, SelectionOptions()).layers:
        assert layer.stability == {"jaccard": 1.0, "regret_even": 0.0, "regret_odd": 0.0}


def test_stability_is_what_two_selections_say() -> None:
    statistics = small_statistics(experts=12, top_k=3)
    odd = {d: {n: statistics.domains[d][n] - s for n, s in ls.items()} for d, ls in statistics.half.items()}
    plan = select(statistics, SelectionOptions())
    alone = [select(replace(statistics, domains=half, half={}), SelectionOptions()) for half in (statistics.half, odd)]
    for whole, even_layer, odd_layer in zip(plan.layers, alone[0].layers, alone[1].layers):
        assert even_layer.stability is None
        first, second = set(even_layer.pruned), set(odd_layer.pruned)
        assert whole.stability is not None
        assert whole.stability["jaccard"] == pytest.approx(len(first & second) / len(first | second))
        sums = odd["a"][whole.name] + odd["b"][whole.name]
        matrix = interaction(sums, product="norms", normalise="all_tokens")
        cost = matrix[np.ix_(even_layer.pruned, even_layer.pruned)].sum()
        assert whole.stability["regret_even"] == pytest.approx(cost / odd_layer.cost - 1)


def test_an_empty_half_is_said_not_guessed() -> None:
    statistics = small_statistics()
    nothing = {d: {n: s - s for n, s in ls.items()} for d, ls in statistics.half.items()}
    plan = select(replace(statistics, half=nothing), SelectionOptions())
    assert all(layer.stability is None for layer in plan.layers)
    assert any("stability is not known: a, b" in warning for warning in plan.warnings)


def test_domains_weigh_the_same_in_both_halves() -> None:
    statistics = small_statistics(experts=12, top_k=3)
    # Three quarters of domain b fall into the even half; the halves still hold as much of it as the whole.
    even = {"a": statistics.half["a"], "b": {n: s + s + s for n, s in statistics.half["b"].items()}}
    odd_b = {n: statistics.domains["b"][n] - s for n, s in statistics.half["b"].items()}
    whole = {"a": statistics.domains["a"], "b": {n: s + odd_b[n] for n, s in even["b"].items()}}
    skewed = replace(statistics, domains=whole, half=even)
    for part in ("even", "odd"):
        mix = balanced(skewed, {"a": 2.0}, part)
        tokens = {d: mix[d] * float(_part(skewed, d, part).tokens) for d in "ab"}
        assert tokens == pytest.approx({"a": 2 * 300, "b": 600})
    alone = {"a": statistics.half["a"], "b": {n: s - s for n, s in statistics.half["b"].items()}}
    plan = select(replace(statistics, half=alone), SelectionOptions())
    assert any("stability leaves out b" in warning for warning in plan.warnings)
    assert all(layer.stability for layer in plan.layers)


def _part(statistics: RoutingStatistics, domain: str, part: str) -> LayerStatistics:
    name = statistics.layers[0].name
    even, whole = statistics.half[domain][name], statistics.domains[domain][name]
    return even if part == "even" else whole - even


def test_sets_from_noise_are_called_unstable() -> None:
    statistics = small_statistics(experts=32, top_k=1)
    few = {d: {n: layer_statistics(32, 12, 1, 5, even=True) for n in ls} for d, ls in statistics.half.items()}
    whole = {d: {n: s + layer_statistics(32, 12, 1, 6) for n, s in ls.items()} for d, ls in few.items()}
    plan = select(replace(statistics, domains=whole, half=few), SelectionOptions.parse({"budget": {"prune": 0.25}}))
    jaccard = [layer.stability["jaccard"] for layer in plan.layers if layer.stability]
    assert (min(jaccard) < 0.6) == any("unstable sets" in warning for warning in plan.warnings)


def test_the_interaction_matrix_is_its_definition() -> None:
    sums = silence(layer_statistics(6, 40, 2, 3), [4])
    paper = interaction(sums, product="norms", normalise="co_selected")
    theorem = interaction(sums, product="norms", normalise="all_tokens")
    gram = interaction(sums, product="outputs", normalise="all_tokens")
    for i in range(6):
        for j in range(6):
            together = sums.co_count[i, j]
            assert paper[i, j] == pytest.approx(sums.norm_product[i, j] / together if together else 0.0)
            assert theorem[i, j] == pytest.approx(sums.norm_product[i, j] / 40)
            assert gram[i, j] == pytest.approx(sums.output_product[i, j] / 40)
    assert np.linalg.eigvalsh(theorem)[0] > -1e-12
    diagonal = interaction(sums, product="norms", normalise="co_selected", pairwise=False)
    assert np.array_equal(diagonal, np.diag(np.diagonal(paper)))
    with pytest.raises(ValueError, match="no counted token"):
        interaction(replace(sums, tokens=np.int64(0)), product="norms", normalise="all_tokens")


def test_shrinkage_draws_rare_pairs_to_the_product_of_means() -> None:
    sums = silence(layer_statistics(6, 40, 2, 3), [4])
    plain = interaction(sums, product="norms", normalise="co_selected")
    count = np.maximum(sums.count, 1)
    mean = sums.gated_norm_sum / count
    little, much = (interaction(sums, product="norms", normalise="co_selected", shrinkage=k) for k in (1e-9, 1e12))
    off = ~np.eye(6, dtype=bool) & (sums.co_count > 0)
    assert np.allclose(little[off], plain[off])
    assert np.allclose(much[off], np.outer(mean, mean)[off])
    assert np.allclose(np.diagonal(much), np.diagonal(plain))
    assert not much[4].any()
    between = interaction(sums, product="norms", normalise="co_selected", shrinkage=5.0)
    i, j = np.argwhere(off)[0]
    expected = (sums.norm_product[i, j] + 5 * mean[i] * mean[j]) / (sums.co_count[i, j] + 5)
    assert between[i, j] == pytest.approx(expected)
