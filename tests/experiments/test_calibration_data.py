"""The experiment on calibration data runs from the data to its figures, with few tokens."""

import csv
import sys
from pathlib import Path

import pytest

import moeprune

FOLDER = Path(moeprune.__file__).parents[1] / "experiments" / "calibration-data"
TABLES = ("mix", "count", "tokens")


@pytest.mark.slow
def test_measure_and_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import measure
    import plot

    monkeypatch.setattr(sys, "argv", ["measure.py", *TABLES, "--small", "-o", str(tmp_path)])
    measure.main()
    for name in TABLES:
        with (tmp_path / f"{name}.csv").open() as fresh, (FOLDER / f"{name}.csv").open() as kept:
            assert next(csv.reader(fresh)) == next(csv.reader(kept))
    monkeypatch.setattr(sys, "argv", ["plot.py", "-o", str(tmp_path)])
    plot.main()
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in ("mix", "tokens"))
