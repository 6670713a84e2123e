"""The scripts of experiments/dense-kernels run, and their tables say what the README reads from them."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

import moeprune

FOLDER = Path(moeprune.__file__).parents[1] / "experiments" / "dense-kernels"


@pytest.mark.parametrize(
    "script", [["benchmark.py", "--sizes", "128", "--repeats", "1"], ["errors.py", "--size", "256"]]
)
def test_the_scripts_run(script, tmp_path):
    output = tmp_path / "table.csv"
    command = [sys.executable, str(FOLDER / script[0]), *script[1:], "-o", str(output)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    with output.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > 10
    assert all(0 <= float(row["error"]) < 1 for row in rows)


def test_the_published_table_has_ours_ahead_everywhere():
    with (FOLDER / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    ours = {(row["method"], row["size"]): row for row in rows if row["kernel"] == "moeprune"}
    others = [row for row in rows if row["kernel"] != "moeprune"]
    assert {row["kernel"] for row in others} == {"plain rewrite", "llm-compressor"}
    for row in others:
        mine = ours[row["method"], row["size"]]
        assert float(mine["seconds"]) < float(row["seconds"])
        assert float(mine["error"]) <= float(row["error"]) * 1.001
