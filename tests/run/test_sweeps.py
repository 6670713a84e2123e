"""W&B sweeps drive `moeprune run`: what the agent would start is built by W&B's own code and run here, offline."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

from moeprune.config.load import load_run, read_yaml
from moeprune.run.tracking import read_records

ROOT = Path(__file__).parents[2]
SWEEPS = sorted((ROOT / "configs" / "sweeps").glob("*.yaml"))
FEW = ["calibration.domains.0.tokens=2000", "evaluation.domains=[{name: agent, path: 'reference:agent', tokens: 1000}]"]


def commands(sweep):
    """What the agent starts for every combination of the sweep's values, as it puts it together."""
    value, _ = read_yaml(sweep)
    for chosen in itertools.product(*(parameter["values"] for parameter in value["parameters"].values())):
        args = {name: {"value": one} for name, one in zip(value["parameters"], chosen, strict=True)}
        filled = create_sweep_command_args({"args": args})
        words = create_sweep_command(value["command"])
        yield [part for word in words for part in (filled[word[2:-1]] if word.startswith("${") else [word])]


@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda path: path.stem)
def test_every_combination_is_a_run(sweep):
    configs = set()
    for program, verb, config, *overrides in commands(sweep):
        assert (program, verb) == ("moeprune", "run")
        options = load_run(ROOT / config, overrides)
        assert options.tracking.wandb == "online"
        configs.add(options.selection.model_dump_json())
    assert len(configs) == 16


def test_each_run_of_a_sweep_has_its_own_directory_and_the_agents_id(tmp_path):
    first, *_, last = commands(SWEEPS[0])
    for run_id, (_, _, config, *overrides) in {"run1": first, "run2": last}.items():
        words = [word.replace("=online", "=offline") for word in overrides] + FEW + ["evaluation.tasks=[]"]
        command = [sys.executable, "-m", "moeprune", "run", config, *words, "--output", str(tmp_path)]
        environment = os.environ | {"WANDB_SWEEP_ID": "sweep7", "WANDB_RUN_ID": run_id, "WANDB_MODE": "offline"}
        subprocess.run(command, check=True, cwd=ROOT, env=environment)
        records = read_records(tmp_path / "one-method-sweep7" / run_id / "metrics.jsonl")
        assert next(record for record in records if record["kind"] == "wandb")["id"] == run_id
        assert any("fidelity/kl/worst" in record.get("metrics", {}) for record in records)
    assert len(list((tmp_path / "shared").iterdir())) == 1  # one recording for all
