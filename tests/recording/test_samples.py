"""The token sample: the same whatever the batch, the pass or the kill; weights, halves, sums, the projection."""

import numpy as np
import pytest
import torch

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.sample import FIELDS
from moeprune.artifacts.statistics import RoutingStatistics
from moeprune.models.layers import find_moe_layers, model_fingerprint
from moeprune.models.loading import (
    load_model,
)
from moeprune.models.options import ModelOptions
from moeprune.models.streaming.model import open_streamed
from moeprune.recording import sample_rows as module
from moeprune.recording.checks import RecordingError
from moeprune.recording.recorder import record
from moeprune.recording.streamed import record_streamed
from tests.tiny import build, save_tiny
from tests.tokens import random_pieces, token_set

PIECES = random_pieces([40, 17, 33, 25, 64, 9, 12, 80])


@pytest.fixture(scope="module")
def model():
    return build("qwen3_moe")


def samples(statistics):
    return {name: sums.sample for name, sums in statistics.domains["all"].items()}


def assert_same(one, other, **tolerance):
    for name, sample in samples(one).items():
        for statistic in FIELDS:
            a, b = getattr(sample, statistic), getattr(samples(other)[name], statistic)
            np.testing.assert_allclose(a, b, err_msg=f"{name} {statistic}", **(tolerance or {"rtol": 0}))


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(module, "TOKENS", 50)
    monkeypatch.setattr(module, "DIMENSION", 8)


@pytest.mark.usefixtures("small")
def test_batches_and_order_change_nothing(model):
    whole = record(model, token_set(PIECES), statistics="samples")
    pieces = record(model, token_set(PIECES[::-1]), statistics="samples", batch_tokens=50)
    assert samples(whole)[whole.layers[0].name].outputs.shape == (50, 8, 8)
    assert_same(whole, pieces, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("small")
def test_rows_are_the_experts_own_outputs_projected(model):
    counted = [np.arange(len(piece)) % 2 == 0 for piece in PIECES]
    statistics = record(model, token_set(PIECES, counted=counted), statistics="samples")
    matrix = torch.from_numpy(module.projection(32))
    for layer in find_moe_layers(model):
        seen = []
        handle = layer.experts.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0]))
        with torch.no_grad():
            for piece in PIECES:
                model(input_ids=torch.tensor([piece]))
            handle.remove()
            hidden = torch.cat([states[np.flatnonzero(mask)] for states, mask in zip(seen, counted)])
            logits = layer.router(hidden)[0]
            ones = torch.ones(len(hidden), 1)
            outputs = [layer.experts(hidden, torch.full((len(hidden), 1), e), ones) @ matrix for e in range(8)]
        expected = np.stack([output.numpy() for output in outputs], axis=1)
        sample = samples(statistics)[layer.name]
        for row in range(len(sample.logits)):
            found = int(np.abs(logits.numpy() - sample.logits[row]).max(axis=1).argmin())
            np.testing.assert_allclose(sample.logits[row], logits[found].numpy(), rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(sample.outputs[row], expected[found], rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("small")
def test_weights_halves_mixes_and_sums(model):
    statistics = record(model, token_set(PIECES), statistics="samples")
    name, total = statistics.layers[0].name, sum(map(len, PIECES))
    parts = [statistics.mix(part=part)[name].sample for part in ("all", "even", "odd")]
    assert parts[0].weight.sum() == pytest.approx(total)
    assert 0 < len(parts[1].weight) < 50
    assert len(parts[1].weight) + len(parts[2].weight) == 50
    assert parts[1].even.all()
    assert not parts[2].even.any()
    assert statistics.mix({"all": 3.0})[name].sample.weight.sum() == pytest.approx(3 * total)
    both = statistics + statistics
    assert both.mix()[name].sample.weight.sum() == pytest.approx(2 * total)
    default = record(model, token_set(PIECES))
    assert (statistics + default).mix()[name].sample is None
    assert default.domains["all"][name].sample is None


@pytest.mark.usefixtures("small")
def test_the_file_holds_the_sample(model, tmp_path):
    statistics = record(model, token_set(PIECES), statistics="samples")
    statistics.save(tmp_path / "s.safetensors")
    loaded = RoutingStatistics.load(tmp_path / "s.safetensors")
    assert_same(statistics, loaded)
    name = loaded.layers[0].name
    np.testing.assert_array_equal(loaded.half["all"][name].sample.outputs, statistics.half["all"][name].sample.outputs)
    assert (loaded.layers[0].scoring, loaded.layers[0].renormalise) == ("softmax", True)


@pytest.mark.usefixtures("small")
def test_a_killed_recording_ends_with_the_same_sample(model, tmp_path):
    calls = []

    def killed(done, total):
        calls.append(done)
        if len(calls) == 3:
            raise KeyboardInterrupt

    arguments = {"statistics": "samples", "batch_tokens": 50, "partial": tmp_path / "p", "commit_seconds": 0.0}
    with pytest.raises(KeyboardInterrupt):
        record(model, token_set(PIECES), on_progress=killed, **arguments)
    resumed = record(model, token_set(PIECES), **arguments)
    assert_same(resumed, record(model, token_set(PIECES), statistics="samples", batch_tokens=50))


def test_the_projection_keeps_lengths_on_average():
    source = np.random.default_rng(1)
    vectors = source.normal(size=(2000, 512))
    ratio = np.square(vectors @ module.projection(512)).sum(axis=1) / np.square(vectors).sum(axis=1)
    assert ratio.mean() == pytest.approx(1, abs=0.02)
    assert 0.1 < ratio.std() < 0.2  # sqrt(2 / 64) and a little less
    np.testing.assert_array_equal(module.projection(64), np.eye(64))


def test_a_layer_never_takes_more_than_its_bytes(monkeypatch):
    monkeypatch.setattr(module, "LAYER_BYTES", 20_000)
    chosen = module.drawn_tokens(token_set(PIECES), 128, 32)
    assert 0 < sum(chosen.size.values()) * 128 * 33 * 4 <= 20_000


def test_a_rule_that_is_not_the_models_is_an_error():
    other = build("qwen3_moe")
    handle = find_moe_layers(other)[0].router.register_forward_hook(lambda m, a, out: (out[0] * 0.5, *out[1:]))
    with pytest.raises(RecordingError, match=r"layers\.0\.mlp: replaying the rule"):
        record(other, token_set(PIECES), statistics="samples")
    handle.remove()


def test_a_family_whose_rule_cannot_be_replayed_is_refused(model, monkeypatch):
    import dataclasses

    from moeprune.models import families

    unknown = dataclasses.replace(families.FAMILIES["qwen3_moe"], routing="by moonlight")
    monkeypatch.setitem(families.FAMILIES, "qwen3_moe", unknown)
    with pytest.raises(
        InputError, match=r"by moonlight.*cannot be replayed; record with calibration\.statistics=default"
    ):
        record(model, token_set(PIECES), statistics="samples")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_streamed_pass_keeps_the_same_sample(family, tmp_path):
    source = ModelOptions(path=str(save_tiny(family, tmp_path, num_hidden_layers=3, shard_size="60KB")))
    plain = load_model(source, device="cpu").model
    fingerprint = model_fingerprint(plain, find_moe_layers(plain))
    arguments = {"statistics": "samples", "batch_tokens": 50}
    streamed = record_streamed(
        open_streamed(source, device="cpu"), token_set(PIECES), fingerprint=fingerprint, **arguments
    )
    assert_same(record(plain, token_set(PIECES), **arguments), streamed, rtol=1e-5, atol=1e-5)
