"""The README stays true: its commands are the ones CI runs, its table is what the first one measures."""

import json
import re
import sys
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


def calls():
    """Every `moeprune VERB ...` that README.md and CONTRIBUTING.md name, in blocks or in running text."""
    text = README + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    text = re.sub(r"\n +|\n(?=--)", " ", text)
    return sorted(set(re.findall(r"moeprune ([a-z]+\b[^`\n|#]*)", text)))


def test_every_verb_and_option_that_is_named_exists():
    from typer.main import get_command

    from moeprune.cli import app

    verbs = get_command(app).commands
    found = [(verb, words) for verb, _, words in (call.partition(" ") for call in calls()) if verb in verbs]
    assert {verb for verb, _ in found} >= {"run", "grid", "check", "record", "select", "prune", "evaluate", "report"}
    for verb, words in found:
        known = {option for parameter in verbs[verb].params for option in parameter.opts} | {"--help"}
        named = set(re.findall(r"(?<!\S)--[a-z-]+", words.partition("&&")[0]))
        assert named <= known, f"moeprune {verb} {words}"


def test_every_config_that_is_named_is_there():
    for path in re.findall(r"\bconfigs/[\w/-]+\.yaml", README):
        assert (ROOT / path).is_file(), path


def test_the_criterion_of_the_contributing_page_works(tmp_path):
    import numpy as np

    from moeprune.selection.options import SelectionOptions
    from moeprune.selection.select import select
    from tests.report.example_run import statistics

    code = re.search(r"^```python\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(), re.S | re.M).group(1)
    (tmp_path / "my_criteria.py").write_text(code)
    sys.path.insert(0, str(tmp_path))
    try:
        options = {"criterion": {"name": "my_criteria:Tempered", "power": 2}, "budget": {"prune": 0.5}}
        plan = select(statistics(layers=2, experts=8, tokens=400), SelectionOptions.parse(options))
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("my_criteria", None)
    for layer, sums in zip(plan.layers, statistics(layers=2, experts=8, tokens=400).mix().values(), strict=True):
        scores = sums.gated_norm_sum / np.maximum(sums.count, 1)
        assert set(layer.pruned) == set(np.argsort(scores, kind="stable")[:4].tolist())
