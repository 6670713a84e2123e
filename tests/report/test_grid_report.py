"""A grid's report: its numbers against naive loops, its runs whatever their state, its files in every form."""

import csv
import itertools
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import read_json, write_json
from moeprune.report.grid_record import Grid, read_grid, read_runs, short_keys
from moeprune.report.grid_report import grid_report, write_comparison, write_grid_report
from moeprune.report.ranks import COMMON, agreement, cost_share, spearman, standings
from tests.report.example_grid import HARM, hope_share, make_grid
from tests.report.test_run_report import Tags, section


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A grid with every run done."""
    return make_grid(tmp_path_factory.mktemp("grids"), ratios=(0.25, 0.5), layers=2, broken=False)


@pytest.fixture(scope="module")
def broken_original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_grid(tmp_path_factory.mktemp("grids"), layers=2)


@pytest.fixture
def broken(broken_original: Path, tmp_path: Path) -> Path:
    """A fresh copy of a grid with a failed, an unfinished and a missing run."""
    shutil.copytree(broken_original.parent, tmp_path / "runs")
    return tmp_path / "runs" / broken_original.name


def markdown(grid: Grid) -> str:
    return grid_report(grid).markdown.replace("\\", "")


def test_states_of_runs(broken: Path) -> None:
    grid = read_grid(broken)
    assert [run.name for run in grid.runs] == read_json(broken / "grid.json")["runs"]
    states = {run.name: run.status for run in grid.runs if run.status != "done"}
    assert states == {"frequency-p12-s1": "failed", "frequency-p25-s1": "unfinished", "frequency-p50-s1": "missing"}
    text = markdown(grid)
    assert "| `frequency-p12-s1` | *failed* | RuntimeError: out of memory in layer 3 |" in text
    assert "| `frequency-p25-s1` | *unfinished* | the run stopped after `select` |" in text
    assert "| `frequency-p50-s1` | *missing* | never started |" in text
    assert "1 failed, 1 unfinished and 1 missing of 30 runs" in text.split("## ")[0]
    assert text.count("`frequency-p50-s1`") == 2  # among the missing and in the table of runs, nowhere else


def test_a_run_that_failed_is_failed_whatever_an_earlier_call_measured(broken: Path) -> None:
    listed = read_json(broken / "grid.json")
    write_json(broken / "grid.json", listed | {"failed": {"hope-p25-s0": "InputError: of another config"}})
    grid = read_grid(broken)
    run = next(run for run in grid.runs if run.name == "hope-p25-s0")
    assert (run.status, run.reason, run.metrics) == ("failed", "InputError: of another config", {})
    assert run not in grid.done


def test_a_failure_can_stand_in_the_run_itself(broken: Path) -> None:
    (broken / "grid.json").unlink()
    record = read_json(broken / "frequency-p25-s1" / "run.json")
    write_json(broken / "frequency-p25-s1" / "run.json", record | {"error": "KeyError: 'x'"})
    states = {run.name: (run.status, run.reason) for run in read_grid(broken).runs if run.status != "done"}
    assert states["frequency-p25-s1"] == ("failed", "KeyError: 'x'")
    assert states["frequency-p12-s1"][0] == "unfinished"
    assert "frequency-p50-s1" not in states  # nothing names it any more


def test_differing_fields(whole: Path) -> None:
    grid = read_grid(whole)
    assert grid.differing == [
        "selection.criterion.name",
        "selection.criterion.normalise",
        "selection.budget.prune",
        "calibration.seed",
    ]
    assert {grid.setting(run) for run in grid.runs} == {""}
    assert short_keys(["selection.criterion.name", "selection.solver.name"]) == {
        "selection.criterion.name": "criterion",
        "selection.solver.name": "solver",
    }
    assert short_keys(["a.b.seed", "c.seed", "c.prune"]) == {
        "a.b.seed": "b.seed",
        "c.seed": "c.seed",
        "c.prune": "prune",
    }
    text = markdown(grid)
    assert "| `selection.budget.prune` | 0.25, 0.5 |" in text
    assert "| `hope-p25-s0` | hope | all_tokens | 0.25 | 0 | 25.0 % |" in text


def test_seeds_repeat_a_method_and_settings_do_not(broken: Path) -> None:
    name = "random-p25-s0"
    text = (broken / name / "config.yaml").read_text()
    (broken / name / "config.yaml").write_text(
        text.replace("tokens: 65536}\n    - {name: python", "tokens: 9}\n    - {name: python")
    )
    plan = read_json(broken / name / "plan.json")
    plan["criterion"]["seed"] = 7
    write_json(broken / name / "plan.json", plan)
    grid = read_grid(broken)
    run = next(run for run in grid.runs if run.name == name)
    assert grid.names[name] == "random"
    assert grid.setting(run) == "tokens 9"


def test_standings_against_a_naive_count(whole: Path) -> None:
    grid = read_grid(whole)
    found = standings(grid)
    assert found is not None
    assert (found.conditions, found.domains, found.left_out) == (4, 3, 0)
    kl = {
        (grid.names[run.name], run.name.split("-", 1)[1], d): run.metrics[f"fidelity/kl/{d}"]
        for run in grid.runs
        for d in HARM
    }
    pairs = {key[1:] for key in kl}
    for standing in found.methods:
        ranks, wins, logs = [], 0, []
        for condition, domain in pairs:
            own = kl[standing.method, condition, domain]
            others = [kl[method, condition, domain] for method in grid.methods]
            ranks.append(1 + sum(other < own for other in others))
            wins += own == min(others)
            logs.append(math.log(own / min(others)))
        assert standing.rank.measure.value == pytest.approx(np.mean(ranks))
        assert standing.wins == wins
        assert standing.relative.measure.value == pytest.approx(math.exp(np.mean(logs)))
        assert standing.rank.measure.low <= standing.rank.measure.value <= standing.rank.measure.high
        seen = [(c, d) for c, d in pairs if d != "prose"]  # calibration saw agent and python
        ranks = [1 + sum(kl[m, c, d] < kl[standing.method, c, d] for m in grid.methods) for c, d in seen]
        assert standing.rank_seen.measure.value == pytest.approx(np.mean(ranks))
    assert set(found.seen) == {"agent", "python"}
    values = [standing.rank.measure.value for standing in found.methods]
    assert values == sorted(values)
    assert sum(values) == pytest.approx(sum(range(1, len(values) + 1)))
    assert found.methods[0].rank.best
    assert not found.methods[0].rank.level


def test_methods_that_measure_the_same_are_level(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "grid")
    for path in (tmp_path / "grid").glob("reap-*/metrics.json"):
        shutil.copy(tmp_path / "grid" / path.parent.name.replace("reap", "hope") / "metrics.json", path)
    found = standings(read_grid(tmp_path / "grid"))
    assert found is not None
    by_name = {standing.method: standing for standing in found.methods}
    a, b = by_name["HOPE (norms, all_tokens)"], by_name["REAP"]
    assert a.rank.measure.value == b.rank.measure.value
    assert a.rank.best == b.rank.best
    assert a.relative.measure == b.relative.measure


def test_one_condition_gives_no_interval(whole: Path, tmp_path: Path) -> None:
    for name in ("hope-p25-s0", "reap-p25-s0"):
        shutil.copytree(whole / name, tmp_path / "grid" / name)
    grid = read_grid(tmp_path / "grid")
    found = standings(grid)
    assert found is not None
    assert found.methods[0].rank.measure.low is None
    text = markdown(grid)
    assert "One condition alone gives no intervals" in text
    assert "not clearly ahead of" in text
    assert "All runs prune the same share" in text


def test_conditions_that_miss_a_method_are_left_out(broken: Path) -> None:
    found = standings(read_grid(broken))
    assert found is not None
    assert (found.conditions, found.left_out) == (3, 3)


def test_agreement_against_a_naive_count(whole: Path) -> None:
    grid = read_grid(whole)
    table, names = agreement(grid), list(grid.methods)
    kept = {(grid.names[run.name], run.name.split("-", 1)[1]): run.record.plan.kept for run in grid.runs if run.record}
    for (i, a), (j, b) in itertools.combinations(enumerate(names), 2):
        scores = []
        for condition in {key[1] for key in kept}:
            for layer, one in kept[a, condition].items():
                other = kept[b, condition][layer]
                both = len([expert for expert in one if expert in other])
                scores.append(both / (len(one) + len(other) - both))
        assert table[i, j] == pytest.approx(np.mean(scores))
        assert table[i, j] == table[j, i]
    assert np.diagonal(table).tolist() == [1.0] * len(names)


def test_cost_shares_are_what_the_sums_say(whole: Path) -> None:
    for run in read_grid(whole).runs:
        assert run.record is not None
        assert run.record.statistics is not None
        assert run.record.plan is not None
        assert cost_share(run, COMMON) == pytest.approx(hope_share(run.record.statistics, run.record.plan))
        naive = []
        for name, sums in run.record.statistics.mix().items():
            pruned = [e for e in range(len(sums.count)) if e not in run.record.plan.kept[name]]
            naive.append(sums.count[pruned].sum() / sums.count.sum())
        assert cost_share(run, {"name": "frequency"}) == pytest.approx(np.mean(naive))


def test_a_criterion_of_somebodys_own_is_no_obstacle(whole: Path) -> None:
    run = read_grid(whole).runs[0]
    assert cost_share(run, {"name": "not.installed.here:Mine"}) is None
    assert cost_share(run, {"name": "file", "path": "x.json"}) is None


def test_spearman() -> None:
    assert spearman([1, 2, 3], [1, 10, 100]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 2], [1, 2]) is None
    assert spearman([1, 1, 1], [1, 2, 3]) is None


def test_csv_holds_every_run_and_every_metric(broken: Path) -> None:
    assert write_grid_report(broken, formats=["csv"]) == broken / "report.csv"
    assert not (broken / "report.html").exists()
    with (broken / "report.csv").open(newline="") as file:
        rows = {row["run"]: row for row in csv.DictReader(file)}
    assert len(rows) == 30
    metrics = json.loads((broken / "hope-p25-s1" / "metrics.json").read_text())
    row = rows["hope-p25-s1"]
    assert {name: float(row[name]) for name in metrics} == metrics
    assert (row["status"], row["selection.budget.prune"], row["pruned_share"]) == ("done", "0.25", "0.25")
    assert rows["frequency-p50-s1"]["status"] == "missing"
    assert rows["frequency-p12-s1"]["fidelity/kl/agent"] == ""


def test_html_and_markdown_are_whole(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole.parent, tmp_path / "runs")
    grid = tmp_path / "runs" / whole.name
    page = write_grid_report(grid)
    assert page == grid / "report.html"
    tags = Tags()
    tags.feed(page.read_text())
    assert tags.open == []
    assert not tags.seen & {"script", "iframe", "object", "link"}
    assert len(tags.fetched) == 10
    assert all(value.startswith("data:image/png;base64,") for value in tags.fetched)
    named = re.findall(r"\]\(figures/([^)]*)\)", (grid / "report.md").read_text())
    assert named == ["curves.png", "worst-domains.png", "agreement.png", "objectives.png", "sizes.png"]
    assert {path.name for path in (grid / "figures").iterdir()} == set(named)
    assert (grid / "report.csv").is_file()
    assert len(read_grid(grid).runs) == 20  # the report's own files are not taken for runs


def test_without_statistics_the_objectives_are_said_to_be_missing(broken: Path) -> None:
    shutil.rmtree(broken.parent / "shared")
    text = markdown(read_grid(broken))
    assert "are not at hand" in section(text, "Does the objective predict the damage?")


def test_a_grid_without_a_finished_run(broken: Path) -> None:
    for path in broken.glob("*/metrics.json"):
        path.unlink()
    text = markdown(read_grid(broken))
    assert "**No run of this grid is done yet; 1 failed, 28 unfinished and 1 missing of 30 runs.**" in text


def test_one_method_alone(broken: Path) -> None:
    (broken / "grid.json").unlink()
    for path in broken.iterdir():
        if path.is_dir() and not path.name.startswith("hope-"):
            shutil.rmtree(path)
    text = markdown(read_grid(broken))
    assert "there are no two methods to rank" in text
    assert "There is nothing to rank: only one method was run." in text
    assert "figures/curves.png" in text


def test_many_settings_get_a_figure_each(broken: Path) -> None:
    (broken / "grid.json").unlink()
    for number, path in enumerate(sorted(broken.glob("*-p*-s*/config.yaml"))):
        text = path.read_text().replace("65536", str(1000 + number % 5))
        path.write_text(text)
    figures = re.findall(r"figures/(curves[^.]*)\.png", markdown(read_grid(broken)))
    assert len(figures) == 5


def test_comparison_of_runs_from_anywhere(whole: Path, tmp_path: Path) -> None:
    runs = [whole / "hope-p25-s0", whole / "reap-p25-s0"]
    written = write_comparison(runs, tmp_path / "out", formats=["md"])
    assert written == tmp_path / "out" / "report.md"
    assert [run.name for run in read_runs(runs).runs] == ["hope-p25-s0", "reap-p25-s0"]
    with pytest.raises(InputError, match="not a run directory"):
        read_runs([tmp_path])
    copies = [tmp_path / project / "runs" / "q" for project in ("one", "two")]
    for run, copy in zip(runs, copies, strict=True):
        shutil.copytree(run, copy)
    grid = read_runs(copies)
    assert grid.names == {"one/runs/q": "HOPE", "two/runs/q": "REAP"}
    with pytest.raises(InputError, match="named twice"):
        read_runs([copies[0], tmp_path / "one" / ".." / "one" / "runs" / "q"])


def test_bad_input(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such directory"):
        write_grid_report(tmp_path / "nowhere")
    with pytest.raises(InputError, match="holds no run"):
        write_grid_report(tmp_path)
    with pytest.raises(InputError, match="pdf is not a format"):
        write_grid_report(whole, formats=["pdf"])
