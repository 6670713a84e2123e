"""Compresses a checkpoint block by block and prints what the operating system says about memory, as JSON.

python -m tests.dense.peak_worker CHECKPOINT WARM_UP OUTPUT: the second, a tiny checkpoint of the same family, is taken
through the same code first, so that code which is loaded when it is first used does not count.
"""

import json
import sys
from pathlib import Path

import torch

from moeprune.dense.compress import compress_checkpoint
from moeprune.dense.methods.pruning import SparseGPT, Wanda
from moeprune.models.options import ModelOptions
from moeprune.models.streaming.model import open_streamed
from tests.recording.peak_worker import memory, peak_over
from tests.tokens import random_pieces, token_set

METHODS = [
    SparseGPT(pattern="2:4", targets=("attention",), minimum_tokens=1),
    Wanda(pattern="2:4", targets=("routed_expert",), minimum_tokens=1),
]


def main() -> None:
    big, small, output = map(Path, sys.argv[1:4])
    torch.set_num_threads(1)
    told = {}
    for directory, pieces in ((small, 2), (big, 16)):
        tokens = token_set(random_pieces([100 + 7 * n % 400 for n in range(pieces)]))
        start = memory("VmRSS")
        peak_over(start)
        compress_checkpoint(directory, output / directory.name, METHODS, tokens, device="cpu", streaming="on")
        told["compress"] = peak_over(start)
        streamed = open_streamed(ModelOptions(path=str(directory)), device="cpu")
        told |= {"layer": streamed.layer_bytes, "weights": streamed.bytes_of(streamed.names), "start": start}
        told["layers"] = len(streamed.layers)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
