"""YAML and overrides become one validated config; every mistake is named with its line and the nearest key."""

from pathlib import Path

import pytest

from moeprune.artifacts.errors import InputError
from moeprune.config.grid_file import load_grid
from moeprune.config.load import dump_yaml, load_run
from moeprune.config.schema import RunConfig

RUNS = sorted((Path(__file__).parents[2] / "configs" / "runs").glob("*.yaml"))


def written(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_every_shipped_config_loads_and_comes_back(path, tmp_path):
    config = load_run(path)
    assert load_run(written(tmp_path, dump_yaml(config))) == config


def test_defaults_are_the_main_job():
    config = RunConfig()
    assert config.model.path == "reference"
    assert config.selection.criterion.name == "hope"


def test_overrides_reach_sections_and_list_items(tmp_path):
    path = written(tmp_path, "calibration:\n  domains:\n    - {name: a, path: 'reference:agent'}\n")
    config = load_run(
        path, ["selection.budget.prune=0.25", "calibration.domains.0.tokens=99", "tracking.wandb=disabled"]
    )
    assert config.selection.budget.prune == 0.25
    assert config.calibration.domains[0].tokens == 99
    assert config.tracking.wandb == "disabled"


def test_numbers_are_numbers_and_words_stay_words(tmp_path):
    config = load_run(written(tmp_path, "runtime: {streaming: on}\nselection:\n  budget: {prune: 1e-1}\n"))
    assert config.runtime.streaming == "on"
    assert config.selection.budget.prune == 0.1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("selecton: {}\n", r"run\.yaml:1: unknown key selecton; did you mean 'selection'\?"),
        ("model:\n  path: reference\n  dtyp: auto\n", r"run\.yaml:3: unknown key model\.dtyp; did you mean 'dtype'\?"),
        (
            "selection:\n  criterion:\n    name: hope\n    normalize: all_tokens\n",
            r"run\.yaml:4: unknown key selection\.criterion\.normalize; did you mean 'normalise'\?",
        ),
        ("selection:\n  criterion: {name: hoope}\n", r"run\.yaml:2: selection\.criterion.*'hoope'.*'hope'"),
        ("selection:\n  solver: {name: swop}\n", r"run\.yaml:2: selection\.solver\.name: 'swop' is not known; did you"),
        (
            "calibration:\n  domains:\n    - {name: a, path: p, tokns: 5}\n",
            r"run\.yaml:3: unknown key calibration\.domains\.0\.tokns; did you mean 'tokens'\?",
        ),
        ("model: {path: a}\nmodel: {path: b}\n", r"run\.yaml:2: .*duplicate key"),
        ("selection:\n  budget: {prune: '50%'}\n", r"run\.yaml:2: selection\.budget\.prune: .*50%.*not a number"),
        ("selection:\n  budget: {prune: 25.0}\n", r"for 25 % write 0\.25"),
        ("selection:\n  budget: {prune: .nan}\n", r"selection\.budget\.prune"),
        ("selection:\n  budget: {prune: 0}\n", "would remove nothing"),
        ("selection:\n  budget: {prune: 1.0}\n", "not a fraction"),
        ("- a\n- b\n", "expected a mapping"),
        ("model: [\n", r"run\.yaml:2"),
        ("", "expected a mapping"),
        ("calibration:\n  domains: []\n", "calibration.domains"),
        ("selection:\n  criterion: {name: mone}\n", "mone needs output_sum: set calibration.statistics: all"),
        ("selection:\n  criterion: {name: reroute}\n", "reroute needs sample: set calibration.statistics: samples"),
        (
            "calibration:\n  domains:\n    - {name: a, path: x}\n    - {name: a, path: y}\n",
            "two domains are called 'a'",
        ),
    ],
)
def test_mistakes_are_explained(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        load_run(written(tmp_path, text))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("selection.budget", "expected key=value"),
        ("selection.budget.prun=0.5", "did you mean 'prune'"),
        ("calibration.domains.3.tokens=5", r"items 0\.\.0"),
        ("selection.budget.prune.x=1", "is a value, not a section"),
        ("selection.budget.prune=[", "not a YAML value"),
    ],
)
def test_bad_overrides_are_explained(tmp_path, override, message):
    text = "selection: {budget: {prune: 0.5}}\ncalibration: {domains: [{name: a, path: x}]}\n"
    with pytest.raises(InputError, match=message):
        load_run(written(tmp_path, text), [override])


def test_a_missing_file_is_bad_input(tmp_path):
    with pytest.raises(InputError, match="no such config file"):
        load_run(tmp_path / "none.yaml")


def test_mixes_that_mean_the_same_are_one_run(tmp_path):
    domains = "{calibration: {domains: [{name: a, path: 'reference:agent'}, {name: b, path: 'reference:prose'}]}}"
    (tmp_path / "base.yaml").write_text(domains)
    grid = tmp_path / "grid.yaml"
    axis = "base: base.yaml\naxes: {{mix: {{one: {{selection: {{mix: {{a: 1}}}}}}, both: {{selection: {{mix: {}}}}}}}}}"
    grid.write_text(axis.format("{a: 1, b: 1}"))
    with pytest.raises(InputError, match=r"runs one and both are the same config.*0 leaves it out"):
        load_grid(grid, [])
    grid.write_text(axis.format("{a: 1, b: 0}"))
    assert list(load_grid(grid, [])) == ["one", "both"]
