"""Run directories: what is found again, what runs again, and what two processes at once leave."""

import importlib
import json
import shutil
import sys

import pytest

from moeprune.artifacts.errors import InputError
from moeprune.config.schema import RunConfig
from moeprune.report.run_record import read_run
from moeprune.run import stages
from moeprune.run.directory import Run, differences
from moeprune.run.pipeline import run_pipeline
from moeprune.run.run_data import Inputs
from moeprune.run.select_stage import baseline_options

pytestmark = pytest.mark.usefixtures("plain_figures")

CONFIG = {
    "calibration": {"domains": [{"name": "agent", "path": "reference:agent", "tokens": 2000}]},
    "evaluation": {"baselines": [{"name": "reap"}]},
    "tracking": {"wandb": "disabled"},
}


TEXT = {"name": "agent", "path": "reference:prose", "tokens": 1000}  # no questions in it
MINE = """
import numpy as np
from moeprune.selection.objective import Modular

class Mine:
    def objective(self, evidence):
        scores = np.ones(evidence.layer.num_experts)
        scores[{gone}] = 0.0
        return Modular(scores)
"""


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
    assert second.recall("record", "k") is None
    second.reread()
    assert second.recall("record", "k") is not None


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


def test_what_an_earlier_plan_left_is_not_read_until_it_is_the_plan_again(tmp_path):
    sets, base, directory = tmp_path / "sets.json", tmp_path / "base.json", tmp_path / "run"
    chosen = {"criterion": {"name": "file", "path": str(sets)}, "budget": {"prune": 4}}
    baselines = [{"name": "file", "path": str(base)}]
    options = config(selection=chosen, evaluation={"baselines": baselines}, checkpoint={"save": False})

    def run(first, **words):
        sets.write_text(json.dumps({str(layer): list(range(first, first + 4)) for layer in range(4)}))
        return run_pipeline(options, directory, **words)

    base.write_text(json.dumps({str(layer): [0] for layer in range(4)}))
    metrics = run(0).metrics
    before = read_run(directory)
    run(8, until="select")
    assert list(stages_of(directory)) == ["record", "select"]
    assert read_run(directory).plan != before.plan
    assert not read_run(directory).metrics
    assert "metrics.json is of an earlier call" in " ".join(read_run(directory).missing)
    assert run(0).metrics == metrics
    assert read_run(directory).plan == before.plan
    assert read_run(directory).stages["evaluate"] == before.stages["evaluate"]  # and nothing is measured again


def test_a_redo_that_is_refused_takes_nothing_away(tmp_path):
    texts = tmp_path / "heldout.jsonl"
    texts.write_text(json.dumps({"text": "one two three four five six seven eight nine ten " * 8}) + "\n")
    held = {"domains": [{"name": "t", "path": str(texts)}]}
    recorded = run_pipeline(config(evaluation=held), tmp_path / "run", until="record").written
    done = stages_of(tmp_path / "run")
    texts.unlink()
    with pytest.raises(InputError, match=r"heldout\.jsonl"):
        run_pipeline(config(evaluation=held), tmp_path / "run", redo="record")
    assert recorded.is_file()
    assert stages_of(tmp_path / "run") == done


def test_a_stage_that_began_is_not_done_and_what_follows_is_outdated(tmp_path):
    run = Run.open(tmp_path, config())
    for name in ("record", "select", "evaluate"):
        run.finish(name, {"key": f"{name}-1", "seconds": 1.0}, [f"said by {name}"])
    run.begin("select")
    assert list(stages_of(tmp_path)) == ["record"]
    assert run.record.warnings == ["said by record"]
    assert run.recall("select", "select-1") is None  # its files may be half of another plan
    assert run.recall("evaluate", "evaluate-2") is None
    assert run.recall("evaluate", "evaluate-1") is not None  # its inputs are the same after all
    run.forget("select")
    assert run.recall("evaluate", "evaluate-1") is None


def test_a_checkpoint_that_is_made_again_holds_the_results(tmp_path):
    few = [{"name": "agent", "path": "reference:agent", "tokens": 500}]
    options, directory = config(calibration={"domains": few}, evaluation={"domains": few}), tmp_path / "run"
    run_pipeline(options, directory)
    record = (directory / "checkpoint" / "moeprune.json").read_text()
    assert "fidelity/kl/agent" in json.loads(record)["results"]
    shutil.rmtree(directory / "checkpoint")
    run_pipeline(options, directory)
    assert (
        json.loads((directory / "checkpoint" / "moeprune.json").read_text())["results"] == json.loads(record)["results"]
    )


@pytest.mark.parametrize("section", ["baselines", "dense"])
def test_lists_of_one_name_or_in_another_order_are_another_config(section):
    items = {
        "baselines": [{"name": "hope", "product": "outputs"}, {"name": "hope", "product": "norms"}, {"name": "reap"}],
        "dense": [{"name": "magnitude", "sparsity": 0.5}, {"name": "rtn"}, {"name": "magnitude", "sparsity": 0.25}],
    }[section]
    one, *others = (
        config(**({"evaluation": {"baselines": found}} if section == "baselines" else {"dense": found}))
        for found in (items, items[::-1], [items[1], items[0], items[2]], items[:2])
    )
    assert not differences(one, one)
    assert all(differences(one, other) for other in others)


def test_another_content_of_a_prune_set_or_a_class_is_another_plan(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    sets, code = tmp_path / "sets.json", tmp_path / "mine_of_runs.py"
    for path, name in ((sets, {"name": "file", "path": str(sets)}), (code, {"name": "mine_of_runs:Mine"})):
        kept = []
        for first in (0, 10):
            gone = list(range(first, first + 4))
            sets.write_text(json.dumps({str(layer): gone for layer in range(4)}))
            code.write_text(MINE.format(gone=gone))
            sys.modules.pop("mine_of_runs", None)
            importlib.invalidate_caches()
            options = config(selection={"criterion": name, "budget": {"prune": 4}}, evaluation={})
            run_pipeline(options, tmp_path / f"run-{path.stem}", shared=tmp_path / "shared", until="select")
            kept.append(json.loads((tmp_path / f"run-{path.stem}" / "plan.json").read_text())["layers"][0]["kept"])
        assert kept == [list(range(4, 32)), [*range(10), *range(14, 32)]]


def test_an_evaluation_of_recorded_trajectories_is_not_called_held_out(tmp_path):
    lines = [json.dumps({"text": f"Record {n} has a text of its own, long enough to count. " * 4}) for n in range(12)]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    (tmp_path / "other.jsonl").write_text("\n".join(line.replace("Record", "Another") for line in lines))
    mine, other = ({"name": name, "path": str(tmp_path / f"{name}.jsonl")} for name in ("mine", "other"))
    options = config(calibration={"domains": [mine]}, evaluation={"domains": [mine, other]}, checkpoint={"save": False})
    outcome = run_pipeline(options, tmp_path / "run")
    assert stages_of(tmp_path / "run")["evaluate"]["recorded"] == {"mine": 12}
    assert any("mine: 12 of 12 trajectories were recorded" in warning for warning in outcome.warnings)
    assert "held-out" not in (tmp_path / "run" / "report.md").read_text()


def test_data_that_evaluation_lacks_is_missed_before_recording(tmp_path):
    lost = {"domains": [{"name": "x", "path": "nope.jsonl"}]}
    for evaluation, message in ((lost, "nope.jsonl"), ({"tasks": ["agent"], "domains": [TEXT]}, "ends in ####")):
        with pytest.raises(InputError, match=message):
            run_pipeline(config(evaluation=evaluation), tmp_path / "run")
    with pytest.raises(InputError, match="config holds one count"):
        run_pipeline(config(selection={"budget": {"scope": "global"}}, evaluation={}), tmp_path / "run2")
    assert not list(tmp_path.iterdir())  # so that the same command works once the config is mended


def test_a_criterion_is_no_baseline_of_itself():
    twice = [{"name": "reap"}, {"name": "hope"}, {"name": "reap"}]
    options = config(evaluation={"baselines": twice}, selection={"criterion": {"name": "hope"}})
    assert list(baseline_options(options)) == ["reap"]


def test_the_pruned_directory_that_dense_consumed_is_not_missed(tmp_path):
    run = Run.open(tmp_path, config())
    assert stages.lost_files(run, {"key": "k", "checkpoint": stages.PRUNED}) == []
    assert stages.lost_files(run, {"key": "k", "checkpoint": "checkpoint"}) == ["checkpoint"]


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
