"""A model larger than memory: what the operating system says compressing it takes, over the size at start."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recording.test_peak import LARGE, ROOT
from tests.tiny import save_tiny


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")
def test_a_model_of_24_layers_is_compressed_in_an_eighth_of_its_weights(tmp_path):
    """Walk, writing and the comparison after it; statistics and results of a block are in it."""
    big = save_tiny("qwen3_moe", tmp_path / "big", shard_size="100MB", **LARGE)
    small = save_tiny("qwen3_moe", tmp_path / "small")
    for attempt in range(2):  # a busy machine frees memory later: what is needed is the lower of two peaks
        output = tmp_path / f"out-{attempt}"
        command = [sys.executable, "-m", "tests.dense.peak_worker", str(big), str(small), str(output)]
        sizes = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout)
        assert sizes["layers"] == 24
        if sizes["weights"] > 8 * sizes["compress"]:
            return
    pytest.fail(f"more than an eighth, twice: {sizes}")
