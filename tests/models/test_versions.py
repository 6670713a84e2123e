"""An untested release of transformers is said, in the table, in recordings and in reports of what was written."""

import sys

import transformers

from moeprune.checkpoint.inventory import inventory
from moeprune.checkpoint.prune import prune_checkpoint
from moeprune.commands.inspect import families_table
from moeprune.config.load import validate
from moeprune.config.schema import RunConfig
from moeprune.models.families import FAMILIES, VERIFIED_WITH
from moeprune.run.run_data import Inputs
from moeprune.run.team import recorded
from tests.checkpoint.sources import plan_for
from tests.tiny import save_tiny

WORDS = f"families were verified with {VERIFIED_WITH}"
CONFIG = {
    "calibration": {"domains": [{"name": "agent", "path": "reference:agent", "tokens": 1500}]},
    "tracking": {"wandb": "disabled"},
}


def test_the_verified_release_is_installed_and_says_nothing(tmp_path):
    assert transformers.__version__.startswith(f"{VERIFIED_WITH}.")
    assert inventory(save_tiny("qwen3_moe", tmp_path / "source")).warnings == ()
    lines, summary = families_table()
    assert not any(line.startswith("warning") for line in lines)
    assert {row["model_type"] for row in summary["families"] if row["verified"]} == {
        name for name, row in FAMILIES.items() if row.verified
    }


def test_another_release_warns_wherever_it_matters(tmp_path, monkeypatch):
    source = save_tiny("qwen3_moe", tmp_path / "source")
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.99.0")  # what an import inside a function gives
    lines, summary = families_table()
    assert any(line.startswith("warning") and "5.99.0" in line for line in lines)
    assert not any(row["verified"] for row in summary["families"])
    report = prune_checkpoint(source, plan_for(source), tmp_path / "out")
    assert any(WORDS in warning for warning in report.warnings)
    statistics = recorded(Inputs(validate(RunConfig, CONFIG, place="config")), tmp_path / "partial", "key")
    assert any(WORDS in warning for warning in statistics.manifest["warnings"])
