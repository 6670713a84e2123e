"""Fidelity in one read of the weights equals fidelity with the models in memory, bit for bit."""

import numpy as np
import pytest

from moeprune.artifacts.errors import InputError
from moeprune.evaluation import fidelity_streamed as module
from moeprune.evaluation.fidelity import compare, compare_students, logits_of
from moeprune.evaluation.fidelity_streamed import compare_streamed, compare_two_streamed
from moeprune.evaluation.students import pruned_students
from moeprune.models.layers import find_moe_layers, model_fingerprint
from moeprune.models.loading import (
    load_model,
)
from moeprune.models.options import ModelOptions
from moeprune.models.streaming.model import open_streamed
from tests.evaluation.material import random_plan, random_tokens
from tests.tiny import save_tiny

TOKENS = random_tokens([9, 17, 40, 33, 12, 25, 64, 1], domains=("a", "b"))
BATCH = 70


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Two checkpoints of one family and vocabulary."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return [save_tiny("qwen3_moe", folder / str(seed), seed=seed, num_hidden_layers=3) for seed in (0, 1)]


@pytest.fixture(scope="module")
def models(sources):
    loaded = [load_model(ModelOptions(path=str(source)), device="cpu").model for source in sources]
    for parameter in (parameter for model in loaded for parameter in model.parameters()):
        parameter.data = parameter.data.clone()  # kernels round by how memory is aligned, and a mapped file lies anyhow
    return loaded


@pytest.fixture
def streams(sources):
    return [open_streamed(ModelOptions(path=str(source)), device="cpu") for source in sources]


def assert_equal(a, b):
    assert list(a.domains) == list(b.domains)
    for domain, sums in a.domains.items():
        assert sums.trajectories == b.domains[domain].trajectories
        np.testing.assert_array_equal(sums.values(), b.domains[domain].values())


@pytest.fixture(scope="module")
def plans(models):
    return {"half": random_plan(models[0], 4), "quarter": random_plan(models[0], 6, seed=1)}


@pytest.mark.parametrize("passes", [6, 1024])
def test_a_teacher_and_two_plans(models, streams, plans, tmp_path, monkeypatch, passes):
    monkeypatch.setattr(module, "PASSES", passes)  # 6: two batches at a time in three forms
    model, fingerprint = models[0], model_fingerprint(models[0], find_moe_layers(models[0]))
    expected = compare_students(model, pruned_students(model, plans), TOKENS, batch_tokens=BATCH)
    steps = []
    streamed = compare_streamed(
        streams[0],
        plans,
        TOKENS,
        fingerprint=fingerprint,
        batch_tokens=BATCH,
        scratch=tmp_path,
        on_progress=lambda done, total: steps.append((done, total)),
    )
    for label in plans:
        assert_equal(streamed[label], expected[label])
        assert streamed[label].metrics() == expected[label].metrics()
    assert steps == sorted(steps)
    assert steps[-1][0] == steps[-1][1]
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_against_another(models, streams):
    teacher, student = models
    expected = compare(logits_of(teacher), {"": logits_of(student)}, TOKENS, batch_tokens=BATCH)[""]
    assert_equal(compare_two_streamed(*streams, TOKENS, batch_tokens=BATCH), expected)


def test_a_plan_of_another_model_is_refused(streams, plans):
    with pytest.raises(InputError, match="made for another model"):
        compare_streamed(streams[1], plans, TOKENS, fingerprint="0" * 16)
