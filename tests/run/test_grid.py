"""A small grid on the reference model: one recording, runs resumed and measured together, failures recorded."""

import json
import shutil
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
from moeprune.run.grid import run_grid
from tests.run.small_grid import AXES, BASE, results, write_grid

pytestmark = pytest.mark.usefixtures("plain_figures")

GRIDS = sorted((Path(__file__).parents[2] / "configs" / "grids").glob("*.yaml"))


class Broken:
    """A criterion that fails when it is asked."""

    def objective(self, evidence):
        raise RuntimeError("out of order")


@pytest.fixture
def grid(tmp_path):
    return write_grid(tmp_path)


def forget(run, *stages):
    """run.json without these stages, as a kill before they were entered leaves it."""
    record = json.loads((run / "run.json").read_text())
    for stage in stages:
        del record["stages"][stage]
    (run / "run.json").write_text(json.dumps(record))


def test_every_run_is_made_once_from_one_recording(finished_grid):
    outcome = finished_grid.outcome
    assert sorted(finished_grid.parts_read) == ["all", "heldout"]  # once for all runs
    assert outcome.done == ["hope-p25", "hope-p50", "reap-p25", "reap-p50"]
    assert not outcome.failed
    assert outcome.report.is_file()
    assert len(list((finished_grid.output / "shared").iterdir())) == 1
    assert json.loads((outcome.directory / "grid.json").read_text())["runs"] == outcome.done


def test_a_run_is_measured_alike_without_company(finished_grid, grid, tmp_path):
    alone = run_grid(grid, [], output=tmp_path / "alone", pattern="reap-p50")
    for name, content in results(alone.directory).items():
        assert results(finished_grid.outcome.directory)[name] == content


def test_runs_that_a_kill_left_unmeasured_end_the_same(finished_grid, grid, tmp_path):
    shutil.copytree(finished_grid.output, tmp_path / "out")
    directory = tmp_path / "out" / "grid"
    (directory / "hope-p50" / "metrics.json").unlink()  # the kill came before it was written
    for name in ("hope-p25", "hope-p50", "reap-p50"):  # or between it and the stage's entry
        forget(directory / name, "evaluate", "report")
    assert run_grid(grid, [], output=tmp_path / "out").done == finished_grid.outcome.done
    assert results(directory) == results(finished_grid.outcome.directory)


@pytest.mark.slow
def test_a_grid_that_is_killed_three_times_ends_like_one_that_was_not(finished_grid, grid, tmp_path, caplog):
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
    assert results(killed) == results(finished_grid.outcome.directory)
    with caplog.at_level("INFO", logger="moeprune"):
        run_grid(grid, [], output=tmp_path / "killed")
    assert caplog.text.count("evaluate: already done") == 4


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
