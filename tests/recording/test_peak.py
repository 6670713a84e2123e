"""A model larger than memory: what the operating system says a streamed pass takes, over the size at start."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import save_tiny

ROOT = Path(__file__).parents[2]
LARGE = {
    "num_hidden_layers": 24,
    "hidden_size": 512,
    "moe_intermediate_size": 256,
    "num_experts": 32,
    "num_experts_per_tok": 4,
}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")
def test_a_model_of_24_layers_takes_an_eighth_of_its_weights(tmp_path):
    big = save_tiny("qwen3_moe", tmp_path / "big", shard_size="100MB", **LARGE)
    small = save_tiny("qwen3_moe", tmp_path / "small")
    command = [sys.executable, "-m", "tests.recording.peak_worker", str(big), str(small), "2000"]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout)
    assert told["layers"] == 24
    assert told["weights"] > 8 * told["record"], told
    assert told["weights"] > 7 * told["evaluate"], told  # the teacher's layer and its pruned form side by side
