"""Runs of a model that accelerate spreads over devices: the same result, and what cannot work is refused early."""

import json

import pytest

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import read_json
from moeprune.config.load import validate
from moeprune.config.schema import CompressConfig, RunConfig
from moeprune.run.pipeline import run_file
from moeprune.run.requirements import require_model
from moeprune.run.run_data import Inputs
from tests.run.test_team import CONFIG, kept

SPREAD = {"": "cpu", "model.layers.1": "disk", "model.norm": "disk"}


@pytest.mark.slow  # two whole runs
def test_a_run_with_layers_on_disk_ends_as_one_in_memory(tmp_path, caplog):
    config, here, spread = tmp_path / "small.yaml", tmp_path / "here", tmp_path / "spread"
    config.write_text(CONFIG)
    run_file(config, [], output=here, until="evaluate")
    words = [f"runtime.device_map={json.dumps(SPREAD)}", f"runtime.offload_folder={tmp_path / 'offload'}"]
    with caplog.at_level("INFO", logger="moeprune"):
        run_file(config, words, output=spread, until="evaluate")
    assert "layer by layer" not in caplog.text
    assert kept(spread) == kept(here)
    metrics = [read_json(output / "small" / "metrics.json") for output in (here, spread)]
    assert {name for name in metrics[0] if name.startswith("fidelity/")}
    assert metrics[0] == metrics[1]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"runtime": {"device_map": "auto", "streaming": "on"}}, "leave one of them out"),
        ({"runtime": {"offload_folder": "/tmp"}}, "set device_map too"),
        ({"runtime": {"device_map": "everywhere"}}, "device_map"),
    ],
)
def test_contradictions_are_refused_with_the_config(section, message):
    with pytest.raises(InputError, match=message):
        validate(RunConfig, section, place="config")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"runtime": {"device_map": {"model.layer": "cpu"}}}, r"no module 'model\.layer'"),
        ({"runtime": {"device_map": {"": "disk"}}}, r"give runtime\.offload_folder"),
        ({"runtime": {"device_map": "auto"}, "evaluation": {"harness": ["arc_easy"]}}, "one device"),
        ({"runtime": {"device_map": "auto"}, "dense": [{"name": "magnitude", "sparsity": 0.5}]}, "in place"),
    ],
)
def test_what_cannot_work_is_refused_before_data_is_read(section, message):
    inputs = Inputs(validate(RunConfig, section, place="config"))
    with pytest.raises(InputError, match=message):
        require_model(inputs)


def test_torchrun_and_a_map_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    inputs = Inputs(validate(RunConfig, {"runtime": {"device_map": "auto"}}, place="config"))
    with pytest.raises(InputError, match="torchrun"):
        require_model(inputs)


def test_compress_reads_layer_by_layer_instead():
    value = {"dense": [{"name": "magnitude", "sparsity": 0.5}], "runtime": {"device_map": "auto"}}
    with pytest.raises(InputError, match=r"runtime\.streaming: on"):
        validate(CompressConfig, value, place="config")
