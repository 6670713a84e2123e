"""Every family of the table: a recording layer by layer is bit for bit the one with the model in memory."""

import numpy as np
import pytest

from moeprune.artifacts.statistics import SUMS
from moeprune.models.families import FAMILIES
from moeprune.models.layers import find_moe_layers, model_fingerprint
from moeprune.models.loading import ModelOptions, load_model
from moeprune.models.streaming import open_streamed
from moeprune.recording.recorder import record
from moeprune.recording.streamed import record_streamed
from tests.tiny import WRAPPERS, save_tiny
from tests.tokens import random_pieces, token_set

TOKENS = token_set(random_pieces([40, 17, 33, 25]))
SUPPORTED = [*(name for name, row in FAMILIES.items() if row.verified), *WRAPPERS]


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_streamed_recording_is_the_plain_one(name, tmp_path):
    source = ModelOptions(path=str(save_tiny(name, tmp_path)))
    model = load_model(source, device="cpu").model
    expected = record(model, TOKENS, batch_tokens=60)
    fingerprint = model_fingerprint(model, find_moe_layers(model))
    found = record_streamed(open_streamed(source, device="cpu"), TOKENS, fingerprint=fingerprint, batch_tokens=60)
    assert found.layers == expected.layers
    for layer, sums in expected.domains["all"].items():
        for statistic in (*SUMS, "output_max"):
            ours, theirs = getattr(found.domains["all"][layer], statistic), getattr(sums, statistic)
            np.testing.assert_array_equal(ours, theirs, err_msg=f"{layer} {statistic}")
