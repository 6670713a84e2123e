"""The experiments on selection run, and the committed results say what their pages say."""

import csv
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import moeprune

EXPERIMENTS = Path(moeprune.__file__).parents[1] / "experiments"


def _run(script: str, *arguments: str) -> None:
    subprocess.run([sys.executable, str(EXPERIMENTS / script), *arguments], check=True, capture_output=True)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_solver_benchmark_runs(tmp_path: Path) -> None:
    _run("solver-benchmark/benchmark.py", "--experts", "16", "--output", str(tmp_path))
    rows = _rows(tmp_path / "results.csv")
    assert {row["solver"] for row in rows} == {"greedy", "relaxed", "swap", "thorough", "slsqp", "exact"}
    assert (tmp_path / "solvers.png").stat().st_size > 10_000
    assert _rows(tmp_path / "certificates.csv")


def test_in_the_committed_benchmark_swap_is_never_above_slsqp_and_ten_times_as_fast_at_256() -> None:
    rows = _rows(EXPERIMENTS / "solver-benchmark" / "results.csv")
    cases: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
    for row in rows:
        cases.setdefault((row["experts"], row["kind"], row["scale"]), {})[row["solver"]] = row
    assert len({case[0] for case in cases}) == 6
    ratios = []
    for (experts, *_), solved in cases.items():
        swap, slsqp = solved["swap"], solved["slsqp"]
        assert float(swap["cost"]) <= float(slsqp["cost"]) + 1e-9 * abs(float(slsqp["cost"]))
        if experts == "256" and slsqp["status"] != "not_converged":
            ratios.append(float(slsqp["seconds"]) / float(swap["seconds"]))
    assert min(ratios) >= 10


def test_the_shrinkage_experiment_runs(tmp_path: Path) -> None:
    sizes = ("--draws", "2", "--tokens", "64", "--reference-tokens", "256")
    _run("shrinkage/shrinkage.py", *sizes, "--output", str(tmp_path))
    assert len(_rows(tmp_path / "results.csv")) == 18
    committed = _rows(EXPERIMENTS / "shrinkage" / "results.csv")
    regret = {(row["tokens"], row["fraction"], row["shrinkage"]): float(row["regret"]) for row in committed}
    for tokens, fraction, strength in regret:
        if strength == "3.0":
            assert regret[(tokens, fraction, "3.0")] <= regret[(tokens, fraction, "0.0")]


@pytest.mark.parametrize("name", ["ranking", "fine-grained"])
def test_the_rankings_say_what_their_pages_say(name: str, tmp_path: Path) -> None:
    for path in (EXPERIMENTS / name).glob("*.csv"):
        shutil.copy(path, tmp_path)
    commands = [["ranking/conclude.py", "--data", str(tmp_path)]]
    commands += [["fine-grained/beside.py"]] if name == "fine-grained" else []
    page = (EXPERIMENTS / name / "README.md").read_text()
    for script, *words in commands:
        command = [sys.executable, str(EXPERIMENTS / script), *words]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rows = [line for line in told.splitlines() if line.startswith("|")]
        assert len(rows) > 10
        assert [row for row in rows if row not in page] == []
    assert (tmp_path / "ranking.png").stat().st_size > 10_000
