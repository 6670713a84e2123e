"""A run gives the same experts in memory, layer by layer and over several processes; what does not fit is streamed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from moeprune.artifacts.files import read_json
from moeprune.config.load import validate
from moeprune.config.schema import RunConfig
from moeprune.run import opened
from moeprune.run.evaluate_stage import measure
from moeprune.run.pipeline import run_file, run_pipeline
from moeprune.run.run_data import Inputs
from tests.tiny import save_tiny

ENVIRONMENT = os.environ | {"WANDB_MODE": "disabled"}
CONFIG = """
model: {path: reference}
calibration:
  domains:
    - {name: agent, path: 'reference:agent', tokens: 6000}
    - {name: prose, path: 'reference:prose', tokens: 3000}
selection: {budget: {prune: 0.5}, criterion: {name: hope}}
evaluation: {domains: [{name: agent, path: 'reference:agent', tokens: 2000}]}
checkpoint: {save: false}
tracking: {wandb: disabled}
runtime: {batch_tokens: 1024}
"""


def start(words):
    """`moeprune WORDS` in two processes that torchrun starts."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *launcher, "-m", "moeprune", *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=ENVIRONMENT, **pipes)


def finish(process):
    told, errors = process.communicate(timeout=300)
    return process.returncode, told, errors


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "small.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def plain(config):
    """The run with the model in memory."""
    output = config.parent / "plain"
    run_file(config, ["runtime.streaming=off"], output=output, until="evaluate")
    return output


def kept(output):
    return [layer["kept"] for layer in read_json(output / "small" / "plan.json")["layers"]]


def statistics(output):
    (path,) = output.glob("shared/*/statistics.safetensors")
    return load_file(path)


def assert_same_statistics(ours, theirs):
    """Counts are equal; float64 sums of the same numbers in another order."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if value.dtype == np.int64:
            np.testing.assert_array_equal(value, theirs[name], err_msg=name)
        else:
            np.testing.assert_allclose(value, theirs[name], rtol=1e-12, err_msg=name)


def test_layer_by_layer_is_the_same_run(config, plain, tmp_path):
    run_file(config, ["runtime.streaming=on"], output=tmp_path, until="evaluate")
    assert_same_statistics(statistics(tmp_path), statistics(plain))
    assert kept(tmp_path) == kept(plain)
    measured, expected = (read_json(output / "small" / "metrics.json") for output in (tmp_path, plain))
    assert measured == pytest.approx(expected, rel=1e-5)


def test_two_processes_choose_what_one_chooses(config, plain, tmp_path):
    code, told, errors = finish(start(["run", config, "--output", tmp_path]))
    assert code == 0, errors
    assert told.split() == [str(tmp_path / "small" / "report.html")], "only the first process prints a result"
    assert_same_statistics(statistics(tmp_path), statistics(plain))
    assert kept(tmp_path) == kept(plain)
    assert not list(tmp_path.rglob("*.partial"))
    code, _, errors = finish(start(["run", config, "--output", tmp_path, "--until", "select"]))
    assert code == 0, errors
    assert "record: already done" in errors


def test_a_killed_process_fails_the_run_and_the_same_command_finishes_it(config, plain, tmp_path):
    words = ["run", config, "--output", tmp_path, "--until", "select"]
    process = start(words)
    assert any(line.startswith("record: ") for line in iter(process.stderr.readline, ""))
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(workers[-1]), signal.SIGKILL)
    code, _, _ = finish(process)
    assert code != 0
    code, _, errors = finish(start(words))
    assert code == 0, errors
    assert kept(tmp_path) == kept(plain)


@pytest.fixture(scope="module")
def tiny_config(tmp_path_factory):
    source = save_tiny("qwen3_moe", tmp_path_factory.mktemp("tiny"))
    data = source / "data.jsonl"
    lines = [f'{{"input_ids": {[10 + (7 * n + 3 * m) % 80 for m in range(40 + n)]}}}\n' for n in range(12)]
    data.write_text("".join(lines))
    named = [{"name": "text", "path": str(data)}]
    value = {
        "model": {"path": str(source)},
        "calibration": {"domains": named, "minimum_tokens": 1},
        "evaluation": {"domains": named, "loops": True},
        "checkpoint": {"save": False},
        "tracking": {"wandb": "disabled"},
    }
    return validate(RunConfig, value, place="test")


def test_a_model_that_does_not_fit_is_read_layer_by_layer_and_what_needs_it_whole_is_named(
    tiny_config, tmp_path, monkeypatch
):
    assert not Inputs(tiny_config).model.streaming
    monkeypatch.setattr(opened, "free_bytes", lambda device: 10_000)
    inputs = Inputs(tiny_config)
    assert inputs.model.weight_bytes > 10_000
    assert inputs.model.streaming
    # The weights alone would fit, but not what loading them holds for a while.
    monkeypatch.setattr(opened, "free_bytes", lambda device: 2 * inputs.model.weight_bytes)
    assert Inputs(tiny_config).model.streaming
    monkeypatch.setattr(opened, "free_bytes", lambda device: 10_000)
    outcome = run_pipeline(tiny_config, tmp_path / "run")
    assert any("loops, harness and speed generate token by token" in warning for warning in outcome.warnings)
    assert "fidelity/kl/text" in outcome.metrics
    assert not any(name.startswith("generation/") for name in outcome.metrics)


def test_streaming_off_loads_whatever_the_memory(tiny_config, monkeypatch):
    monkeypatch.setattr(opened, "free_bytes", lambda device: 0)
    runtime = tiny_config.runtime.model_copy(update={"streaming": "off"})
    assert not Inputs(tiny_config.model_copy(update={"runtime": runtime})).model.streaming


def test_what_a_plan_does_is_measured_alike(tiny_config, monkeypatch, tmp_path):
    config = tiny_config.model_copy(update={"evaluation": tiny_config.evaluation.model_copy(update={"loops": False})})
    run_pipeline(config, tmp_path / "run", until="select")
    from moeprune.artifacts.plan import PrunePlan

    plans = {"own": PrunePlan.load(tmp_path / "run" / "plan.json")}
    whole, _ = measure(Inputs(config), plans)
    monkeypatch.setattr(opened, "free_bytes", lambda device: 0)
    parts, _ = measure(Inputs(config), plans)
    assert parts == whole
