"""Run directories: what is found again, what runs again, and what two processes at once leave."""

import json

import pytest

from moeprune.artifacts.errors import InputError
from moeprune.config.schema import RunConfig
from moeprune.experiment import stages
from moeprune.experiment.inputs import Inputs
from moeprune.experiment.pipeline import run_pipeline
from moeprune.experiment.runs import Run

CONFIG = {
    "calibration": {"domains": [{"name": "agent", "path": "reference:agent", "tokens": 2000}]},
    "evaluation": {"baselines": [{"name": "reap"}]},
    "tracking": {"wandb": "disabled"},
}


def config(**changes):
    return RunConfig.model_validate({**CONFIG, **changes})


def stages_of(directory):
    return json.loads((directory / "run.json").read_text())["stages"]


def test_what_a_kill_leaves_before_the_config_is_no_foreign_directory(tmp_path):
    (tmp_path / ".config.yaml.17.tmp").write_text("half")
    (tmp_path / ".lock").touch()
    Run.open(tmp_path, config())
    assert (tmp_path / "config.yaml").is_file()
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.txt").write_text("keep me")
    with pytest.raises(InputError, match="holds no run"):
        Run.open(other, config())


def test_a_second_process_sees_what_the_first_finished_meanwhile(tmp_path):
    first, second = (Run.open(tmp_path, config()) for _ in range(2))
    first.finish("record", {"key": "k", "seconds": 1.0}, [])
    assert second.entry("record", "k") is None
    second.reread()
    assert second.entry("record", "k") is not None


def test_redo_record_records_again_and_lost_files_are_made_again(tmp_path):
    directory, ready = tmp_path / "run", Inputs(config())

    def run(**options):
        return run_pipeline(config(), directory, inputs=ready, **options)

    recorded = run(until="record").written
    assert ".." not in recorded.parts
    run(until="prune")
    before = {name: (directory / name).read_bytes() for name in ("plan.json", "baselines/reap/plan.json")}
    run(until="record", redo="record")
    assert not stages_of(directory)["record"]["reused"]
    run(until="prune")
    done = stages_of(directory)
    for name in before:
        (directory / name).unlink()
    for path in (directory / "checkpoint").iterdir():
        path.unlink()
    (directory / "checkpoint").rmdir()
    recorded.unlink()
    run(until="prune")
    assert {name: (directory / name).read_bytes() for name in before} == before
    assert (directory / "checkpoint" / "config.json").is_file()
    assert {name: entry["key"] for name, entry in stages_of(directory).items()} == {
        n: e["key"] for n, e in done.items()
    }


def test_the_pruned_directory_that_dense_consumed_is_not_missed(tmp_path):
    run = Run.open(tmp_path, config())
    assert stages._lost(run, {"key": "k", "checkpoint": stages.PRUNED}) == []
    assert stages._lost(run, {"key": "k", "checkpoint": "checkpoint"}) == ["checkpoint"]


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ({"mix": {"prose": 2}}, "unknown domain 'prose'"),
        ({"mix": {"agent": 0}}, "every domain has weight 0"),
        ({"mix": {"agent": -1}}, "not a weight"),
    ],
)
def test_a_mix_that_cannot_be_is_refused_before_recording(tmp_path, selection, message):
    with pytest.raises(InputError, match=message):
        run_pipeline(config(selection=selection), tmp_path / "run")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(tmp_path, device):
    with pytest.raises(InputError, match=r"runtime\.device"):
        run_pipeline(config(runtime={"device": device}), tmp_path / "run")
