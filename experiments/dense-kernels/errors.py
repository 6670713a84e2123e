"""Output error of every method on one layer of correlated inputs, and of the orders people combine them in.

    OMP_NUM_THREADS=1 python experiments/dense-kernels/errors.py --size 1024 -o errors.csv

Error is ||WX - W'X||^2 / ||WX||^2; zeros and bits are counted on the result.
"""

import argparse
import csv
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from benchmark import layer

from moeprune.dense.methods.pruning import Magnitude, SparseGPT, Wanda, WandaUpdate
from moeprune.dense.methods.quantising import AWQ, FP8, GPTQ, NF4, RTN, Joint
from moeprune.dense.methods.result import sparsity_of

HALF, TWO_OF_FOUR = {"sparsity": 0.5}, {"pattern": "2:4"}
SINGLE = {
    **{
        f"{method.__name__.lower()} {text}": method(**fields)
        for text, fields in (
            ("50 %", HALF),
            ("60 %", {"sparsity": 0.6}),
            ("2:4", TWO_OF_FOUR),
            ("4:8", {"pattern": "4:8"}),
        )
        for method in (Magnitude, Wanda, WandaUpdate, SparseGPT)
    },
    "rtn int4 g128": RTN(),
    "rtn int4 g128, scale search": RTN(scale="mse"),
    "awq int4 g128": AWQ(),
    "gptq int4 g128, no act-order, largest weight": GPTQ(activation_order="off", scale="max"),
    "gptq int4 g128, no act-order": GPTQ(activation_order="off"),
    "gptq int4 g128": GPTQ(),
    "gptq int4 g128, asymmetric": GPTQ(symmetric=False),
    "nf4": NF4(),
    "fp8 channel": FP8(),
    "fp8 tensor": FP8(scale="tensor"),
    "rtn int8 per row": RTN(bits=8, group_size=None),
    "joint 50 % + int4 g128": Joint(sparsity=0.5),
    "joint 2:4 + int4 g128": Joint(pattern="2:4"),
}


def combined(weight, inputs):
    """Label -> weight of the two-step orders."""
    pruned = SparseGPT(sparsity=0.5).compress(weight, inputs)
    rounded = GPTQ().compress(weight, inputs)
    return {
        "sparsegpt 50 %, then gptq, mask held": GPTQ().compress(pruned.weight, inputs, held=pruned.mask).weight,
        "sparsegpt 50 %, then rtn, mask held": RTN().compress(pruned.weight, inputs, held=pruned.mask).weight,
        "sparsegpt 50 %, then gptq that forgets the mask": GPTQ().compress(pruned.weight, inputs).weight,
        "gptq, then wanda 50 %": Wanda(sparsity=0.5).compress(rounded.weight, inputs).weight,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).with_name("errors.csv"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    weight, inputs = layer(options.size)
    results = {label: method.compress(weight, inputs).weight for label, method in SINGLE.items()}
    results |= combined(weight, inputs)
    energy = inputs.output_energy(weight)
    with options.output.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("method", "error", "zeros"))
        for label, result in results.items():
            row = (label, f"{inputs.output_energy(weight - result) / energy:.5f}", f"{sparsity_of(result):.3f}")
            writer.writerow(row)
            print(f"{row[0]:50} {row[1]}  zeros {row[2]}")
    print(options.output)


if __name__ == "__main__":
    main()
