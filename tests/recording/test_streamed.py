"""A recording that reads one decoder layer after the other: the same bits as one with the whole model in memory."""

import numpy as np
import pytest

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.statistics import SUMS
from moeprune.models.layers import find_moe_layers, model_fingerprint
from moeprune.models.loading import (
    load_model,
)
from moeprune.models.options import ModelOptions
from moeprune.models.streaming import passes, waiting
from moeprune.models.streaming.model import open_streamed
from moeprune.recording import streamed as streamed_module
from moeprune.recording.checks import RecordingError
from moeprune.recording.recorder import record
from moeprune.recording.streamed import record_streamed
from tests.tiny import save_tiny
from tests.tokens import random_pieces, token_set

TOKENS = token_set(random_pieces([40, 17, 33, 25, 64, 9, 12, 80]))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = save_tiny("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe"), num_hidden_layers=4, shard_size="60KB")
    return ModelOptions(path=str(directory))


@pytest.fixture(scope="module")
def plain(source):
    """The model with weights in memory of its own: views into a file lie anywhere, and kernels round by alignment."""
    model = load_model(source, device="cpu").model
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


@pytest.fixture(scope="module")
def fingerprint(plain):
    return model_fingerprint(plain, find_moe_layers(plain))


def streamed(source, fingerprint, **arguments):
    return record_streamed(open_streamed(source, device="cpu"), TOKENS, fingerprint=fingerprint, **arguments)


@pytest.fixture
def spilled(monkeypatch):
    """Everything that waits is put into files."""
    monkeypatch.setattr(waiting, "SMALL", 0)
    monkeypatch.setattr(passes, "FLOOR", 0)


def assert_equal(a, b):
    assert a.layers == b.layers
    for group, other in ((a.domains, b.domains), (a.half, b.half)):
        for name, sums in group["all"].items():
            for statistic in (*SUMS, "output_max"):
                np.testing.assert_array_equal(getattr(sums, statistic), getattr(other["all"][name], statistic))


@pytest.mark.parametrize("batch_tokens", [50, 8192])
def test_it_equals_the_plain_pass_bit_for_bit(plain, source, fingerprint, batch_tokens):
    expected = record(plain, TOKENS, batch_tokens=batch_tokens, statistics="all")
    found = streamed(source, fingerprint, batch_tokens=batch_tokens, statistics="all")
    assert_equal(found, expected)
    assert found.manifest == expected.manifest


def test_what_waits_in_files_comes_back_bit_for_bit(plain, source, fingerprint, spilled, tmp_path):
    sizes = []

    def look(done, total):
        sizes.append(sum(file.stat().st_size for file in tmp_path.rglob("waiting-*.bin")))

    found = streamed(source, fingerprint, batch_tokens=50, partial=tmp_path, on_progress=look)
    assert_equal(found, record(plain, TOKENS, batch_tokens=50))
    assert max(sizes) >= 280 * 32 * 4, "not even the hidden states of all tokens were in files"
    assert not list(tmp_path.rglob("waiting-*.bin"))


def test_rounds_change_nothing(plain, source, fingerprint, monkeypatch):
    monkeypatch.setattr(streamed_module, "ROUND", 3)
    assert_equal(streamed(source, fingerprint, batch_tokens=50), record(plain, TOKENS, batch_tokens=50))


class Kill:
    """Progress that stops the process at its n-th call."""

    def __init__(self, calls):
        self.left = calls

    def __call__(self, done, total):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


@pytest.mark.parametrize("round_size", [3, 1024])
@pytest.mark.parametrize("moment", [1, 6, 7, 8, 15, 22, 27])
def test_a_kill_ends_bit_for_bit_like_an_uninterrupted_one(
    source, fingerprint, plain, tmp_path, monkeypatch, round_size, moment
):
    monkeypatch.setattr(streamed_module, "ROUND", round_size)
    arguments = {"batch_tokens": 50, "partial": tmp_path, "commit_seconds": 0.0}
    with pytest.raises(KeyboardInterrupt):
        streamed(source, fingerprint, on_progress=Kill(moment), **arguments)
    seen = []
    resumed = streamed(source, fingerprint, on_progress=lambda done, total: seen.append(done), **arguments)
    assert_equal(resumed, record(plain, TOKENS, batch_tokens=50))
    steps = 7 * 4  # batches, layers
    again = len(seen) - (steps - moment)
    assert 0 < again <= min(round_size, 7), "it began again instead of at the last layer border"


def test_a_checkpoint_of_other_routers_is_noticed(source, fingerprint):
    with pytest.raises(RecordingError, match="routers that were read have fingerprint"):
        streamed(source, "0" * 16)


def test_an_incomplete_checkpoint_is_refused_with_the_parameter(tmp_path):
    from safetensors.torch import load_file, save_file

    directory = save_tiny("qwen3_moe", tmp_path)
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"model\.layers\.1\.self_attn\.q_proj\.weight: no tensor on disk makes it"):
        open_streamed(ModelOptions(path=str(directory)), device="cpu")
