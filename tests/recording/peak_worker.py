"""Records and compares a checkpoint layer by layer, and prints what the operating system says about memory, as JSON.

python -m tests.recording.peak_worker CHECKPOINT WARM_UP TOKENS: the second, a tiny checkpoint of the same family, is
taken through the same code first, so that code which is loaded when it is first used does not count.
"""

import json
import sys
from pathlib import Path

import torch

from moeprune.checkpoint.inventory import checkpoint_fingerprint, inventory
from moeprune.evaluation.fidelity_streamed import compare_streamed
from moeprune.models.options import ModelOptions
from moeprune.models.streaming.model import StreamedModel, open_streamed
from moeprune.recording.streamed import record_streamed
from tests.checkpoint.sources import plan_for
from tests.tokens import random_pieces, token_set


def memory(entry: str) -> int:
    """VmRSS or VmHWM (the highest so far) of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{entry}:"))


def peak_over(start: int) -> int:
    """The highest resident size since the last call, over `start`."""
    peak = memory("VmHWM") - start
    Path("/proc/self/clear_refs").write_text("5")
    return peak


def main() -> None:
    big, small = map(Path, sys.argv[1:3])
    torch.set_num_threads(1)
    told = {}
    for directory, tokens in ((small, 100), (big, int(sys.argv[3]))):
        pieces = random_pieces([100 + 7 * n % 400 for n in range(tokens // 250 + 1)])
        fingerprint = checkpoint_fingerprint(inventory(directory))
        plan = plan_for(directory, tuple(range(4, 32) if directory == big else range(2, 8)))
        start = memory("VmRSS")
        peak_over(start)
        streamed = opened(directory)
        record_streamed(streamed, token_set(pieces), fingerprint=fingerprint)
        told["record"] = peak_over(start)
        compare_streamed(opened(directory), {"": plan}, token_set(pieces), fingerprint=fingerprint)
        told["evaluate"] = peak_over(start)
        told |= {"layer": streamed.layer_bytes, "weights": streamed.bytes_of(streamed.names), "start": start}
        told["layers"] = len(streamed.layers)
    print(json.dumps(told))


def opened(directory: Path) -> StreamedModel:
    return open_streamed(ModelOptions(path=str(directory)), device="cpu")


if __name__ == "__main__":
    main()
