"""The script of experiments/dense-weights runs, and its table says what the README reads from it."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

import moeprune

FOLDER = Path(moeprune.__file__).parents[1] / "experiments" / "dense-weights"


@pytest.mark.slow
def test_the_script_runs(tmp_path):
    output = tmp_path / "table.csv"
    command = [sys.executable, str(FOLDER / "measure.py"), "--small", "-o", str(output)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    assert {(row["experts"], row["method"]) for row in rows_of(output)} == {
        (row["experts"], row["method"]) for row in rows_of(FOLDER / "results.csv")
    }


def rows_of(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_the_published_table_says_what_the_readme_says():
    rows = rows_of(FOLDER / "results.csv")
    kl = {(row["experts"], row["method"], row["calibration"]): float(row["kl agent"]) for row in rows}
    prose = {(row["experts"], row["method"], row["calibration"]): float(row["kl prose"]) for row in rows}
    agent = {method: value for (experts, method, data), value in kl.items() if experts == "all" and "half" not in data}
    for amount in ("50 %", "4:8", "2:4"):
        sparse = [agent[f"{name} {amount}"] for name in ("sparsegpt", "wanda_update", "wanda", "magnitude")]
        assert sparse == sorted(sparse)
        assert prose["all", f"sparsegpt {amount}", "agent"] > prose["all", f"magnitude {amount}", "-"]
    fewer = ["rtn int8, a scale a row", "fp8, a scale a row", "gptq int4 g32", "awq int4 g32", "rtn int4 g32"]
    assert [agent[name] for name in fewer] == sorted(agent[name] for name in fewer)
    for method in ("sparsegpt 50 %", "gptq int4 g32"):
        assert prose["all", method, "half agent, half prose"] < prose["all", method, "agent"] / 2
    half = kl["half", "nothing more", "-"]
    assert agent["gptq int3 g32"] < half < kl["half", "gptq int4 g32", "agent"]
    assert not any(int(row["fallbacks"]) for row in rows)
