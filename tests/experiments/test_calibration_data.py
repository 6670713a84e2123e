"""The experiment on calibration data runs from the data to its figures, with few tokens."""

import csv
import runpy
import sys
from pathlib import Path

import pytest

import moeprune

FOLDER = Path(moeprune.__file__).parents[1] / "experiments" / "calibration-data"
TABLES = ("mix", "count", "tokens")


@pytest.mark.slow
def test_measure_and_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["measure.py", *TABLES, "--small", "-o", str(tmp_path)])
    runpy.run_path(str(FOLDER / "measure.py"), run_name="__main__")
    for name in TABLES:
        with (tmp_path / f"{name}.csv").open() as fresh, (FOLDER / f"{name}.csv").open() as kept:
            assert next(csv.reader(fresh)) == next(csv.reader(kept))
    monkeypatch.setattr(sys, "argv", ["plot.py", "-o", str(tmp_path)])
    runpy.run_path(str(FOLDER / "plot.py"), run_name="__main__")
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in ("mix", "tokens"))
