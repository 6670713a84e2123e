"""The criteria experiment runs and resumes, and the committed results say what its page says."""

import csv
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import moeprune

HERE = Path(moeprune.__file__).parents[1] / "experiments" / "criteria"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a script of the experiment and returns what it prints."""

    def script(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(HERE / name), run_name="__main__")
        return capsys.readouterr().out

    return script


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_it_runs_and_goes_on_where_it_stopped(tmp_path: Path, run: Callable[..., str]) -> None:
    arguments = ("--small", "-o", str(tmp_path))
    assert "reap" in run("measure.py", *arguments, "--only", "reap")
    second = run("measure.py", *arguments, "--only", "reap", "reroute")
    assert all(line.endswith(": reroute") for line in second.splitlines())
    assert len(_rows(tmp_path / "results.csv")) == 6


def test_the_committed_results_say_what_the_page_says(tmp_path: Path, run: Callable[..., str]) -> None:
    rows = _rows(HERE / "results.csv")
    assert len(rows) == 3 * 5 * 13
    (tmp_path / "results.csv").write_text((HERE / "results.csv").read_text())
    tables = run("compare.py", "-o", str(tmp_path))
    page = (HERE / "README.md").read_text()
    for line in tables.splitlines():
        assert line in page
    assert (tmp_path / "criteria.png").stat().st_size > 10_000
