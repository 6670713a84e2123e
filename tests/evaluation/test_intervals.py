"""Intervals from resampled trajectories, against cases where the answer is known."""

import numpy as np
import pytest

from moeprune.evaluation.intervals import (
    RESAMPLES,
    Comparison,
    DomainSums,
    base_metrics,
    paired_difference,
    share_metrics,
    wilson,
)


def sums(kl: np.ndarray, tokens: np.ndarray | None = None, shift: float = 0.0) -> DomainSums:
    tokens = np.full(len(kl), 10) if tokens is None else tokens
    names = tuple(f"{index:05d}" for index in range(len(kl)))
    return DomainSums(names, tokens, 2.0 * tokens, 2.0 * tokens + kl, kl + shift * tokens, 0.5 * tokens)


def test_equal_lengths_give_the_normal_interval_of_a_mean() -> None:
    values = np.random.default_rng(1).exponential(size=400)
    metrics = Comparison({"d": sums(values * 10)}).metrics()
    half = 1.96 * values.std() / np.sqrt(len(values))
    assert metrics["fidelity/kl/d"] == pytest.approx(values.mean())
    # 0.3: five standard errors of a 2.5 % quantile from 2000 draws, in units of the mean's standard error.
    tolerance = 0.3 * half / 1.96
    assert metrics["fidelity/kl/d/ci_low"] == pytest.approx(values.mean() - half, abs=tolerance)
    assert metrics["fidelity/kl/d/ci_high"] == pytest.approx(values.mean() + half, abs=tolerance)


def test_figures_weigh_tokens_and_not_trajectories() -> None:
    metrics = Comparison({"d": sums(np.array([30.0, 1.0]), np.array([10, 90]))}).metrics()
    assert metrics["fidelity/kl/d"] == pytest.approx(0.31)
    # Of two trajectories a resample has one, the other or both: the interval ends at the extremes.
    assert metrics["fidelity/kl/d/ci_low"] == pytest.approx(1 / 90)
    assert metrics["fidelity/kl/d/ci_high"] == pytest.approx(3.0)


def test_draws_equal_a_naive_loop() -> None:
    domain, seed = sums(np.array([4.0, 1.0, 7.0]), np.array([10, 20, 30])), 5
    metrics = Comparison({"d": domain}).metrics(seed=seed)
    from hashlib import sha256

    generator = np.random.default_rng([seed, int.from_bytes(sha256(b"d").digest()[:8], "big")])
    ratios = []
    for _ in range(RESAMPLES):
        drawn = [index for index, times in enumerate(generator.multinomial(3, [1 / 3] * 3)) for _ in range(times)]
        ratios.append(sum(domain.kl[index] for index in drawn) / sum(domain.tokens[index] for index in drawn))
    low, high = np.quantile(ratios, [0.025, 0.975])
    assert metrics["fidelity/kl/d/ci_low"] == pytest.approx(low)
    assert metrics["fidelity/kl/d/ci_high"] == pytest.approx(high)


def test_a_constant_difference_has_no_width_although_both_figures_vary() -> None:
    kl, tokens = np.array([5.0, 50.0, 500.0]), np.array([10, 20, 30])
    a, b = Comparison({"d": sums(kl, tokens, shift=0.25)}), Comparison({"d": sums(kl, tokens)})
    difference = paired_difference(a, b)["fidelity/kl/d"]
    assert difference.value == pytest.approx(0.25)
    assert difference.low == pytest.approx(0.25)
    assert difference.high == pytest.approx(0.25)
    own = b.metrics()
    assert own["fidelity/kl/d/ci_high"] - own["fidelity/kl/d/ci_low"] > 1


def test_mean_has_equal_weights_and_worst_is_the_largest() -> None:
    few, many = sums(np.array([1.0, 3.0])), sums(np.arange(100.0))
    metrics = Comparison({"few": few, "many": many}).metrics()
    points = metrics["fidelity/kl/few"], metrics["fidelity/kl/many"]
    assert metrics["fidelity/kl/mean"] == pytest.approx(sum(points) / 2)
    assert metrics["fidelity/kl/worst"] == max(points)
    assert metrics["fidelity/kl/mean/ci_low"] < metrics["fidelity/kl/mean"] < metrics["fidelity/kl/mean/ci_high"]


def test_another_domain_leaves_a_domain_alone() -> None:
    kl = np.array([1.0, 3.0, 8.0])
    alone = Comparison({"a": sums(kl)}).metrics()
    beside = Comparison({"b": sums(kl * 2), "a": sums(kl)}).metrics()
    assert {name: beside[name] for name in alone if "/a" in name} == {n: v for n, v in alone.items() if "/a" in n}


def test_perplexity_is_the_exponential_of_nll_with_its_base_and_interval() -> None:
    metrics = Comparison({"d": sums(np.array([1.0, 3.0, 8.0]))}).metrics()
    for suffix in ("", "/base", "/ci_low", "/ci_high"):
        assert metrics[f"fidelity/perplexity/d{suffix}"] == pytest.approx(np.exp(metrics[f"fidelity/nll/d{suffix}"]))


def test_one_trajectory_gives_no_interval_and_few_give_a_warning() -> None:
    lonely = Comparison({"d": sums(np.array([1.0]))})
    assert not [name for name in lonely.metrics() if "ci_" in name]
    assert "one trajectory" in lonely.warnings[0]
    assert paired_difference(lonely, lonely)["fidelity/kl/d"].low is None
    assert "3 trajectories" in Comparison({"d": sums(np.arange(3.0))}).warnings[0]
    assert not Comparison({"d": sums(np.arange(30.0))}).warnings


def test_pairs_must_be_the_same_trajectories() -> None:
    with pytest.raises(ValueError, match="domain d"):
        paired_difference(Comparison({"d": sums(np.arange(3.0))}), Comparison({"d": sums(np.arange(4.0))}))
    with pytest.raises(ValueError, match="domain d"):
        paired_difference(Comparison({"d": sums(np.arange(3.0))}), Comparison({"e": sums(np.arange(3.0))}))


def test_wilson_solves_its_equation() -> None:
    # The limits are the shares p with |8/10 - p| = z sqrt(p (1 - p) / 10).
    for limit in wilson(8, 10):
        assert abs(0.8 - limit) == pytest.approx(1.959964 * np.sqrt(limit * (1 - limit) / 10), rel=1e-6)
    assert wilson(0, 5)[0] == 0
    assert wilson(5, 5)[1] == 1
    assert wilson(5, 5)[0] < 0.6


def test_shares_by_group_add_up() -> None:
    metrics = share_metrics("x", [True, False, True, True], ["a", "a", "b", "b"])
    assert (metrics["x"], metrics["x.a"], metrics["x.b"]) == (0.75, 0.5, 1.0)
    assert base_metrics(metrics) == {"x/base": 0.75, "x.a/base": 0.5, "x.b/base": 1.0}


def test_the_worst_domain_keeps_its_own_interval_where_it_is_always_the_worst() -> None:
    metrics = Comparison({"low": sums(np.arange(50.0)), "high": sums(np.arange(1000.0, 1050.0))}).metrics()
    for suffix in ("", "/ci_low", "/ci_high"):
        assert metrics[f"fidelity/kl/worst{suffix}"] == metrics[f"fidelity/kl/high{suffix}"]


def test_domains_are_drawn_independently() -> None:
    kl = np.random.default_rng(2).exponential(size=300) * 10
    metrics = Comparison({"a": sums(kl), "b": sums(kl)}).metrics()
    widths = {
        name: metrics[f"fidelity/kl/{name}/ci_high"] - metrics[f"fidelity/kl/{name}/ci_low"] for name in ("a", "mean")
    }
    # The mean of two independent, equally uncertain domains: its interval is narrower by the square root of 2.
    assert widths["mean"] / widths["a"] == pytest.approx(2**-0.5, rel=0.1)
