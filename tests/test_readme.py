"""The README stays true: its commands are the ones CI runs, its table is what the first one measures."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COLUMNS = (
    "fidelity/kl/agent",
    "task/accuracy/agent",
    "fidelity/kl/prose",
    "fidelity/kl/python",
    "generation/loop_rate",
)
ROWS = {"**HOPE**": "", "REAP": "baseline/reap/", "frequency": "baseline/frequency/", "random": "baseline/random/"}


def blocks():
    return re.findall(r"^```bash([^\n]*)\n(.*?)^```", README, re.S | re.M)


def test_the_two_commands_stand_first_and_do_all_their_set_up():
    commands = [body.strip() for tag, body in blocks() if "not-run" not in tag]
    assert commands[0].startswith("pip install -e . && moeprune run configs/runs/quickstart.yaml")
    assert commands[1].startswith("pip install -e '.[test]' && pytest")


def test_what_is_not_run_says_why():
    for tag, _ in blocks():
        if "not-run" in tag:
            assert re.fullmatch(r" not-run: \S.+", tag)


def test_every_file_the_readme_names_is_there():
    for path in re.findall(r"\]\((?!http|#)([^)#]+)\)", README):
        assert (ROOT / path).exists(), path


def figures(text):
    """The numbers of a cell: the figure, then its interval."""
    return [float(number) for number in re.findall(r"\d*\.\d+|\d+", text)]


@pytest.mark.parametrize("label", ROWS)
def test_the_result_table_is_what_the_run_measured(label):
    metrics = json.loads((ROOT / "experiments" / "quickstart" / "metrics.json").read_text())
    row = next(line for line in README.splitlines() if line.startswith(f"| {label} |"))
    cells = [cell.strip().replace("**", "") for cell in row.strip("|").split("|")][1:]
    for name, cell in zip(COLUMNS, cells, strict=True):
        shown = figures(cell)
        value = metrics[ROWS[label] + name]
        assert shown[0] == pytest.approx(value, rel=6e-3, abs=6e-3), name
        ends = [metrics[f"{ROWS[label]}{name}/{end}"] for end in ("ci_low", "ci_high")]
        assert shown[1:] == pytest.approx(ends, rel=6e-3, abs=6e-3), name


def test_the_python_example_runs():
    code = re.search(r"^```python\n(.*?)^```", README, re.S | re.M).group(1)
    exec(compile(code.replace("16384", "2048"), "README.md", "exec"), {})
