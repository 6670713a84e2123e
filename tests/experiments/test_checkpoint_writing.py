"""Writing takes a buffer of memory, not a tensor and not a file: measured by the operating system in a process."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "experiments" / "checkpoint-writing" / "measure.py"


def test_memory_does_not_grow_with_the_file(tmp_path):
    """400 MiB in one file: the resident size grows by less than a tenth of what is written."""
    spec = importlib.util.spec_from_file_location("measure", SCRIPT)
    measure = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(measure)
    measure.make_checkpoint(tmp_path / "source", size=400 * 2**20, shard_size=2**40)
    measure.make_plan(tmp_path / "source", tmp_path / "plan.json")
    command = [sys.executable, str(SCRIPT), "--work", str(tmp_path), "--one", "moeprune"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert (tmp_path / "out" / "model-00001-of-00001.safetensors").stat().st_size > 200e6
    assert found["grown_mib"] < 20
