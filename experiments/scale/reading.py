"""CPU seconds that it takes to get the weights of a layer into memory, by their size: a cost a tensor, and one a byte.

    OMP_NUM_THREADS=1 python experiments/scale/reading.py --work /tmp/scale --out experiments/scale/reading.csv

Every layer of a random Qwen3-MoE checkpoint in bfloat16 (32 experts, each with three tensors of its own) is read into
float32 and dropped, as a streamed pass does between the layers' forward passes.
"""

import argparse
import csv
import shutil
import time
from pathlib import Path

from measure import make_checkpoint

SHAPES = [(256, 128, 8), (512, 256, 8), (1024, 512, 4)]  # hidden size, width of an expert, layers
FIELDS = ("hidden", "width", "layers", "run", "tensors", "bytes", "cpu_seconds", "seconds")


def read_layers(source: Path) -> dict[str, float]:
    from moeprune.models.loading import ModelOptions
    from moeprune.models.streaming.model import open_streamed

    streamed = open_streamed(ModelOptions(path=str(source)), device="cpu")
    started, spent = time.perf_counter(), time.process_time()
    for layer in streamed.layers:
        names = streamed.names_in(layer)
        streamed.fill(names)
        streamed.empty(names)
    return {"cpu_seconds": time.process_time() - spent, "seconds": time.perf_counter() - started}


def main() -> None:
    import torch

    from moeprune.checkpoint.inventory import inventory

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="a directory that may be deleted")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("reading.csv"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with arguments.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        for hidden, width, layers in SHAPES:
            shutil.rmtree(arguments.work, ignore_errors=True)
            make_checkpoint(arguments.work, layers=layers, experts=32, hidden=hidden, width=width)
            inside = [t for t in inventory(arguments.work).tensors if t.name.startswith("model.layers.")]
            size = {"tensors": len(inside), "bytes": sum(tensor.entry.size for tensor in inside)}
            for run in range(-1, arguments.runs):  # the first warms up
                row = {
                    "hidden": hidden,
                    "width": width,
                    "layers": layers,
                    "run": run,
                    **size,
                    **read_layers(arguments.work),
                }
                if run >= 0:
                    writer.writerow(row)
                    file.flush()
    shutil.rmtree(arguments.work)


if __name__ == "__main__":
    main()
