"""Every family of the table layer by layer: recording and fidelity are bit for bit those with the model in memory."""

import numpy as np
import pytest

from moeprune.artifacts.statistics import SUMS
from moeprune.evaluation.fidelity import compare_students
from moeprune.evaluation.fidelity_streamed import compare_streamed
from moeprune.evaluation.students import pruned_students
from moeprune.models.families import FAMILIES
from moeprune.models.layers import find_moe_layers, model_fingerprint
from moeprune.models.loading import (
    load_model,
)
from moeprune.models.options import ModelOptions
from moeprune.models.streaming.model import open_streamed
from moeprune.recording.recorder import record
from moeprune.recording.streamed import record_streamed
from tests.models.test_conformance import plan_for
from tests.tiny import WRAPPERS, save_tiny
from tests.tokens import random_pieces, token_set

TOKENS = token_set(random_pieces([40, 17, 33, 25]))
SUPPORTED = [*(name for name, row in FAMILIES.items() if row.verified), *WRAPPERS]


@pytest.fixture(scope="module", params=SUPPORTED)
def tiny(request, tmp_path_factory):
    """(where the checkpoint is, the model in memory, its MoE layers)."""
    source = ModelOptions(path=str(save_tiny(request.param, tmp_path_factory.mktemp(request.param))))
    model = load_model(source, device="cpu").model
    return source, model, find_moe_layers(model)


def test_a_streamed_recording_is_the_plain_one(tiny):
    source, model, layers = tiny
    statistics = "samples" if all(layer.info.scoring for layer in layers) else "all"
    expected = record(model, TOKENS, batch_tokens=60, statistics=statistics)
    found = record_streamed(
        open_streamed(source, device="cpu"),
        TOKENS,
        fingerprint=model_fingerprint(model, layers),
        batch_tokens=60,
        statistics=statistics,
    )
    assert found.layers == expected.layers
    for layer, sums in expected.domains["all"].items():
        for statistic in (*SUMS, "output_max"):
            ours, theirs = getattr(found.domains["all"][layer], statistic), getattr(sums, statistic)
            np.testing.assert_array_equal(ours, theirs, err_msg=f"{layer} {statistic}")


def test_streamed_fidelity_is_the_plain_one(tiny):
    source, model, layers = tiny
    plans = {"": plan_for(model, layers)}
    expected = compare_students(model, pruned_students(model, plans), TOKENS)[""].metrics()
    fingerprint = model_fingerprint(model, layers)
    found = compare_streamed(open_streamed(source, device="cpu"), plans, TOKENS, fingerprint=fingerprint)[""].metrics()
    assert found == expected
    assert expected["fidelity/kl/all"] > 0
