"""Fidelity against a naive loop over tokens, and identities that must hold."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from moeprune.artifacts.errors import InputError
from moeprune.data.trajectories import TokenSet
from moeprune.evaluation import fidelity as module
from moeprune.evaluation.fidelity import bounded_batch_tokens, compare, compare_students, fidelity, logits_of
from moeprune.evaluation.students import pruned_students
from moeprune.models.pruned import pruned
from tests.evaluation.material import piece, random_plan, random_tokens
from tests.tiny import build


@pytest.fixture(scope="module")
def teacher() -> Any:
    return build("qwen3_moe", seed=0)


@pytest.fixture(scope="module")
def other() -> Any:
    return build("qwen3_moe", seed=1)


def naive(teacher: Any, student: Any, token_set: TokenSet, domain: str) -> dict[str, float]:
    """The definitions, one piece and one token at a time, in float64."""
    nll_base, nll, kl, top1, tokens = 0.0, 0.0, 0.0, 0, 0
    for sequence in token_set.sequences:
        if sequence.domain != domain:
            continue
        ids = torch.tensor(sequence.ids[None].astype(np.int64))
        with torch.no_grad():
            p = teacher(input_ids=ids).logits[0].double().softmax(-1).numpy()
            q = student(input_ids=ids).logits[0].double().softmax(-1).numpy()
        for position in range(1, len(sequence.ids)):
            if not sequence.counted[position]:
                continue
            before, target = position - 1, int(sequence.ids[position])
            nll_base -= math.log(p[before, target])
            nll -= math.log(q[before, target])
            kl += sum(a * math.log(a / b) for a, b in zip(p[before], q[before]))
            top1 += int(p[before].argmax() == q[before].argmax())
            tokens += 1
    values = {"nll": nll / tokens, "nll/base": nll_base / tokens, "kl": kl / tokens, "top1": top1 / tokens}
    return values | {"perplexity": math.exp(values["nll"]), "perplexity/base": math.exp(values["nll/base"])}


def test_equals_the_naive_loop_with_masks_and_pieces(teacher: Any, other: Any) -> None:
    generator = np.random.default_rng(7)
    pieces = [
        piece(
            generator.integers(10, 100, length), domain=domain, trajectory=name, counted=generator.random(length) < 0.6
        )
        for length, domain, name in [(9, "a", "0"), (17, "a", "0"), (5, "a", "1"), (12, "b", "0"), (3, "b", "2")]
    ]
    token_set = TokenSet(tuple(pieces), {})
    metrics = compare(logits_of(teacher), {"x": logits_of(other)}, token_set, batch_tokens=40)["x"].metrics()
    for domain in ("a", "b"):
        for measure, expected in naive(teacher, other, token_set, domain).items():
            name, _, base = measure.partition("/")
            measured = metrics[f"fidelity/{name}/{domain}" + (f"/{base}" if base else "")]
            assert measured == pytest.approx(expected, rel=2e-5), measure


def test_the_same_model_differs_in_nothing(teacher: Any) -> None:
    token_set = random_tokens([30, 7, 19, 2], domains=("a", "b"))
    metrics = compare(logits_of(teacher), {"same": logits_of(teacher)}, token_set)["same"].metrics()
    for domain in ("a", "b"):
        assert metrics[f"fidelity/kl/{domain}"] == 0
        assert metrics[f"fidelity/top1/{domain}"] == 1
        assert metrics[f"fidelity/nll/{domain}"] == metrics[f"fidelity/nll/{domain}/base"]
    assert metrics["fidelity/kl/worst"] == 0


def test_batches_and_order_change_nothing(teacher: Any, other: Any) -> None:
    token_set = random_tokens([30, 7, 19, 2, 64, 11, 23, 5], domains=("a", "b"))
    backwards = TokenSet(token_set.sequences[::-1], {})
    wanted = compare(logits_of(teacher), {"x": logits_of(other)}, token_set, batch_tokens=1)["x"].metrics()
    for tokens, data in [(64, token_set), (10_000, token_set), (10_000, backwards)]:
        measured = compare(logits_of(teacher), {"x": logits_of(other)}, data, batch_tokens=tokens)["x"].metrics()
        assert measured.keys() == wanted.keys()
        for name, value in wanted.items():
            assert measured[name] == pytest.approx(value, rel=1e-4), name


def test_chunks_of_the_softmax_change_nothing(teacher: Any, other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    token_set = random_tokens([30, 7, 19])
    wanted = compare(logits_of(teacher), {"x": logits_of(other)}, token_set)["x"].metrics()
    monkeypatch.setattr(module, "CHUNK_LOGITS", {"cpu": 3 * teacher.config.vocab_size})
    assert compare(logits_of(teacher), {"x": logits_of(other)}, token_set)["x"].metrics() == wanted


def test_plans_are_measured_like_models_pruned_by_hand(teacher: Any) -> None:
    token_set = random_tokens([30, 7, 19, 12])
    plans = {"five": random_plan(teacher, 5), "four": random_plan(teacher, 4, seed=1)}
    before = teacher(input_ids=torch.arange(10, 40)[None]).logits
    measured = fidelity(teacher, plans, token_set, batch_tokens=32)
    assert torch.equal(teacher(input_ids=torch.arange(10, 40)[None]).logits, before)
    for label, plan in plans.items():
        small = build("qwen3_moe", seed=0)
        with pruned(small, plan):
            expected = naive(build("qwen3_moe", seed=0), small, token_set, "d")
        assert measured[label]["fidelity/kl/d"] > 1e-4
        assert measured[label]["fidelity/kl/d"] == pytest.approx(expected["kl"], rel=2e-5)
        assert measured[label]["fidelity/nll/d"] == pytest.approx(expected["nll"], rel=2e-5)


def test_per_trajectory_sums_add_up_over_pieces(teacher: Any, other: Any) -> None:
    ids = np.arange(10, 50)
    whole = TokenSet((piece(ids, trajectory="a"), piece(ids[:20], trajectory="b")), {})
    sums = compare(logits_of(teacher), {"x": logits_of(other)}, whole)["x"].domains["d"]
    assert sums.trajectories == ("a", "b")
    assert sums.tokens.tolist() == [39, 19]
    split = TokenSet((piece(ids[:20], trajectory="a"), piece(ids[:20], trajectory="a")), {})
    twice = compare(logits_of(teacher), {"x": logits_of(other)}, split)["x"].domains["d"]
    assert twice.tokens.tolist() == [38]  # the first token of each piece has no predecessor
    assert twice.kl[0] == pytest.approx(2 * sums.kl[1], rel=1e-5)


def test_progress_ends_at_the_number_of_tokens(teacher: Any) -> None:
    seen: list[tuple[int, int]] = []
    token_set = random_tokens([30, 7, 19])
    compare_students(
        teacher,
        pruned_students(teacher, {"p": random_plan(teacher, 5)}),
        token_set,
        batch_tokens=32,
        on_progress=lambda *step: seen.append(step),
    )
    assert seen[-1] == (56, 56)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_large_vocabularies_get_smaller_batches(teacher: Any) -> None:
    assert bounded_batch_tokens(teacher, 8192) == 8192
    large = build("qwen3_moe", vocab_size=2**17)
    assert bounded_batch_tokens(large, 8192) == 2**28 // 2**17


def test_nothing_to_measure_is_refused(teacher: Any) -> None:
    uncounted = TokenSet((piece(range(10, 20)), piece(range(10, 20), domain="e", counted=[False] * 10)), {})
    with pytest.raises(InputError, match="evaluation domain e"):
        compare(logits_of(teacher), {}, uncounted)
    with pytest.raises(InputError, match="nothing to measure"):
        compare(logits_of(teacher), {}, TokenSet((), {}))


def test_another_vocabulary_is_refused(teacher: Any) -> None:
    with pytest.raises(InputError, match="share one vocabulary"):
        compare(logits_of(teacher), {"x": logits_of(build("qwen3_moe", vocab_size=256))}, random_tokens([9]))


def test_logits_that_are_not_finite_fail(teacher: Any) -> None:
    def broken(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        logits = logits_of(teacher)(input_ids, attention_mask)
        return logits.index_fill(2, torch.tensor([3]), float("nan"))

    with pytest.raises(FloatingPointError, match="broken"):
        compare(logits_of(teacher), {"broken": broken}, random_tokens([9]))
