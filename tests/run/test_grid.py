"""A small grid on the reference model: one recording, runs resumed and measured together, failures recorded."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moeprune.artifacts.errors import InputError
from moeprune.commands.check import check_file, parse_bytes
from moeprune.config.grid_file import is_grid, load_grid, merged, only
from moeprune.report.grid_record import read_grid
from moeprune.run import run_data
from moeprune.run.grid import run_grid

GRIDS = sorted((Path(__file__).parents[2] / "configs" / "grids").glob("*.yaml"))
BASE = """
calibration: {domains: [{name: agent, path: 'reference:agent', tokens: 3000}]}
checkpoint: {save: false}
evaluation: {domains: [{name: agent, path: 'reference:agent', tokens: 1500}]}
tracking: {wandb: disabled}
"""
AXES = """
base: base.yaml
axes:
  method:
    hope: {selection: {criterion: {name: hope, product: outputs}}}
    reap: {selection: {criterion: {name: reap}}}
  ratio:
    p25: {selection: {budget: {prune: 0.25}}}
    p50: {selection: {budget: {prune: 0.5}}}
"""


class Broken:
    """A criterion that fails when it is asked."""

    def objective(self, evidence):
        raise RuntimeError("out of order")


@pytest.fixture
def grid(tmp_path):
    (tmp_path / "base.yaml").write_text(BASE)
    path = tmp_path / "grid.yaml"
    path.write_text(AXES)
    return path


def results(directory):
    return {
        f"{run.name}/{name}": (run / name).read_bytes()
        for run in sorted(directory.iterdir())
        if (run / "run.json").is_file()
        for name in ("plan.json", "metrics.json")
    }


def test_every_run_is_made_once_from_one_recording(grid, tmp_path, monkeypatch):
    read = []
    load = run_data.load_tokens
    monkeypatch.setattr(
        run_data, "load_tokens", lambda *words, part, **more: read.append(part) or load(*words, part=part, **more)
    )
    outcome = run_grid(grid, [], output=tmp_path / "out")
    assert sorted(read) == ["all", "heldout"]  # once for all runs
    assert outcome.done == ["hope-p25", "hope-p50", "reap-p25", "reap-p50"]
    assert not outcome.failed
    assert outcome.report.is_file()
    assert len(list((tmp_path / "out" / "shared").iterdir())) == 1
    assert json.loads((outcome.directory / "grid.json").read_text())["runs"] == outcome.done

    alone = run_grid(grid, [], output=tmp_path / "alone", pattern="reap-p50")  # measured without company
    for name, content in results(alone.directory).items():
        assert results(outcome.directory)[name] == content

    before = results(outcome.directory)
    (outcome.directory / "hope-p50" / "metrics.json").unlink()  # as a kill before it was written leaves it
    record = outcome.directory / "hope-p50" / "run.json"
    stages = json.loads(record.read_text())
    for stage in ("evaluate", "report"):
        del stages["stages"][stage]
    record.write_text(json.dumps(stages))
    assert run_grid(grid, [], output=tmp_path / "out").done == outcome.done
    assert results(outcome.directory) == before

    for name in ("hope-p25", "reap-p50"):  # as a kill between metrics.json and the stage's entry leaves it
        record = outcome.directory / name / "run.json"
        stages = json.loads(record.read_text())
        for stage in ("evaluate", "report"):
            del stages["stages"][stage]
        record.write_text(json.dumps(stages))
    assert run_grid(grid, [], output=tmp_path / "out").done == outcome.done
    assert results(outcome.directory) == before


@pytest.mark.slow
def test_a_grid_that_is_killed_three_times_ends_like_one_that_was_not(grid, tmp_path):
    calm = run_grid(grid, [], output=tmp_path / "calm")
    command = [sys.executable, "-m", "moeprune", "grid", "grid.yaml", "--output", "killed"]
    killed = tmp_path / "killed" / "grid"
    # A second after each of these is there: while recording, while plans are made, while two processes work.
    for mark, words in [("grid.json", []), ("hope-p50/plan.json", []), ("reap-p25/plan.json", ["--workers", "2"])]:
        process = subprocess.Popen([*command, *words], cwd=tmp_path, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 300
        while not (killed / mark).is_file() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1.0)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (killed / mark).is_file()
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "killed/grid/report.html"
    assert results(killed) == results(calm.directory)
    again = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert again.stderr.count("evaluate: already done") == 4


def test_a_failed_run_is_recorded_and_the_rest_go_on(grid, tmp_path):
    grid.write_text(AXES.replace("{name: reap}", "{name: 'tests.run.test_grid:Broken'}"))
    outcome = run_grid(grid, [], output=tmp_path / "out")
    assert outcome.done == ["hope-p25", "hope-p50"]
    assert set(outcome.failed) == {"reap-p25", "reap-p50"}
    assert "out of order" in json.loads((outcome.directory / "grid.json").read_text())["failed"]["reap-p25"]
    part = run_grid(grid, [], output=tmp_path / "out", pattern="hope-*")  # says nothing new of the others
    assert not part.failed
    assert set(json.loads((outcome.directory / "grid.json").read_text())["failed"]) == {"reap-p25", "reap-p50"}


def test_everything_is_validated_before_the_first_run(grid, tmp_path):
    with pytest.raises(InputError, match=r"grid\.yaml run hope-p25.*did you mean 'prune'"):
        run_grid(grid, ["selection.budget.prun=3"], output=tmp_path / "out")
    for found, instead, message in (
        ("prune: 0.5", "prune: 29", "top_k=4"),
        ("{name: reap}", "{name: file, path: nowhere.json}", "nowhere.json"),
        ("{name: reap}", "{name: 'tests.nowhere:Broken'}", "cannot import tests.nowhere"),
        ("base: base.yaml", "base: lost.yaml", "nowhere.jsonl"),
    ):
        (tmp_path / "lost.yaml").write_text(BASE.replace("reference:agent', tokens: 1500", "nowhere.jsonl'"))
        grid.write_text(AXES.replace(found, instead))
        with pytest.raises(InputError, match=message):
            run_grid(grid, [], output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_runs_of_another_base_are_refused_and_those_of_a_lost_label_left_out(grid, tmp_path):
    few = ["calibration.domains=[{name: agent, path: 'reference:agent', tokens: 500}]"]
    outcome = run_grid(grid, few, output=tmp_path / "out", pattern="*-p50")
    before = results(outcome.directory)
    with pytest.raises(InputError, match=r"hope-p50 holds a run .* calibration.domains.agent.tokens: 500 -> 3000"):
        run_grid(grid, [], output=tmp_path / "out")
    assert results(outcome.directory) == before
    grid.write_text(AXES.replace("    reap: {selection: {criterion: {name: reap}}}\n", ""))
    run_grid(grid, few, output=tmp_path / "out", pattern="*-p50")
    assert [(run.name, run.status) for run in read_grid(outcome.directory).runs] == [
        ("hope-p25", "missing"),
        ("hope-p50", "done"),
    ]


def test_a_run_of_the_same_name_is_left_alone(grid, tmp_path):
    (tmp_path / "out" / "grid").mkdir(parents=True)
    (tmp_path / "out" / "grid" / "run.json").write_text("{}")
    with pytest.raises(InputError, match="holds a run, not a grid"):
        run_grid(grid, [], output=tmp_path / "out")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (AXES.replace("prune: 0.5", "prune: 0.25"), "runs hope-p25 and hope-p50 are the same config"),
        (AXES.replace("p50:", "p/50:"), "label 'p/50' goes into the run's name"),
        (AXES.replace("base:", "bas:"), r"grid\.yaml:2: unknown key bas"),
        (AXES.replace("base.yaml", "none.yaml"), "no such config file"),
        ("base: base.yaml\naxes: {}\n", "axes: expected a mapping"),
        ("base: base.yaml\naxes: {a: [1]}\n", "axes.a: expected a mapping of label"),
    ],
)
def test_a_bad_grid_is_explained(grid, text, message):
    grid.write_text(text)
    with pytest.raises(InputError, match=message):
        load_grid(grid)


def test_a_section_with_another_name_is_replaced_whole():
    base = {"criterion": {"name": "hope", "product": "norms"}, "seed": 1}
    assert merged(base, {"criterion": {"name": "reap"}}) == {"criterion": {"name": "reap"}, "seed": 1}
    assert merged(base, {"criterion": {"product": "outputs"}})["criterion"] == {"name": "hope", "product": "outputs"}


@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_every_shipped_grid_loads(path):
    assert is_grid(path)
    runs = load_grid(path)
    assert len(runs) >= 24
    assert set(only(runs, "hope-*")) < set(runs)


def test_only_must_match_something(grid):
    with pytest.raises(InputError, match="matches none of hope-p25"):
        only(load_grid(grid), "man-*")


def test_a_check_of_a_grid_lists_its_runs(grid):
    assert check_file(grid, [])["runs"] == ["hope-p25", "hope-p50", "reap-p25", "reap-p50"]
    assert check_file(grid, [], memory="6MB")["fits"]["reference"][0]["bytes"] == 2 * 3_884_416
    with pytest.raises(InputError, match="--memory much"):
        check_file(grid, [], memory="much")


def test_a_check_of_a_global_budget_promises_no_count_a_layer(grid):
    wide = ["selection.budget.scope=global"]
    summary = check_file(grid.with_name("base.yaml"), wide)
    assert {row["kept"] for row in summary["budget"]} == {None}
    with pytest.raises(InputError, match=r"model.layers.0.mlp .. model.layers.3.mlp.*checkpoint.save=false"):
        check_file(grid.with_name("base.yaml"), [*wide, "checkpoint.save=true"])


def test_a_check_counts_data_and_predicts_the_pass(grid):
    summary = check_file(grid.with_name("base.yaml"), [], memory="6MB")
    assert summary["data"]["calibration"]["agent"]["tokens"] == 3000
    assert {row["kept"] for row in summary["budget"]} == {16}
    assert summary["estimate"]["weight_bytes"] == 4 * 3_884_416
    fits = {(row["prune"], row["format"]): row for row in summary["fits"]}
    assert not fits[0.0, "bf16"]["fits"]
    assert fits[0.5, "bf16"]["fits"]
    assert fits[0.5, "bf16"]["bytes"] == pytest.approx(2 * 2_311_552, rel=1e-3)


@pytest.mark.parametrize(("text", "size"), [("80GB", 80 * 10**9), ("24GiB", 24 * 2**30), ("1.5MB", 1_500_000)])
def test_sizes_are_read(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["80", "GB", "-1GB", "80 GBs", "nanGB"])
def test_other_sizes_are_refused(text):
    with pytest.raises(InputError, match="--memory"):
        parse_bytes(text)
