"""Time and error of our kernels beside a plain rewrite and, where it is installed, llm-compressor: one table, ratios.

    OMP_NUM_THREADS=1 python experiments/dense-kernels/benchmark.py --sizes 1024 2048 4096 -o results.csv

Runs alternate within one process on the same layer; figures are medians of CPU seconds on one thread. The layer is
square with correlated inputs and a few loud channels. Error is ||WX - W'X||^2 / ||WX||^2.
"""

import argparse
import csv
import statistics as numbers
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import plain

from moeprune.dense.methods.inputs import InputStatistics
from moeprune.dense.methods.pruning import SparseGPT, Wanda
from moeprune.dense.methods.quantising import GPTQ

COLUMNS = ("method", "size", "kernel", "seconds", "ratio", "error", "zeros")


def layer(size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.eye(size) + torch.randn(size, size, generator=generator) / size**0.5
    loud = torch.exp(torch.randn(size, generator=generator) * 0.5)
    inputs = InputStatistics("layer", size)
    for _ in range(2):
        inputs.add(torch.randn(size, size, generator=generator) @ mix * loud)
    return torch.randn(size, size, generator=generator) / size**0.5, inputs


def ours(weight, inputs):
    def run(method):
        def call():
            inputs.factors.clear()  # every call pays for its own factor
            return method.compress(weight, inputs).weight

        return call

    return {
        "sparsegpt 50 %": run(SparseGPT(sparsity=0.5)),
        "sparsegpt 2:4": run(SparseGPT(pattern="2:4")),
        "wanda 50 %": run(Wanda(sparsity=0.5)),
        "wanda 2:4": run(Wanda(pattern="2:4")),
        "gptq int4 g128": run(GPTQ(activation_order="off")),
        "gptq int4 g128 act-order": run(GPTQ(activation_order="static", scale="max")),
        "gptq int4 g128 act-order, scale search": run(GPTQ()),
    }


def plainly(weight, inputs):
    return {
        "sparsegpt 50 %": lambda: plain.sweep(weight, inputs.hessian, sparsity=0.5),
        "sparsegpt 2:4": lambda: plain.sweep(weight, inputs.hessian, group=4),
        "wanda 50 %": lambda: plain.wanda(weight, inputs.norms()),
        "wanda 2:4": lambda: plain.wanda(weight, inputs.norms(), group=4),
        "gptq int4 g128": lambda: plain.gptq(weight, inputs.hessian),
    }


def llm_compressor(weight, inputs):
    """Its kernels, called with the dictionaries they consume; {} when it is not installed."""
    try:
        from compressed_tensors.quantization import ActivationOrdering, QuantizationArgs
        from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight
        from llmcompressor.modifiers.pruning.sparsegpt.sgpt_sparsify import sparsify_weight as sparsegpt
        from llmcompressor.modifiers.pruning.wanda.wanda_sparsify import sparsify_weight as wanda
    except ImportError:
        return {}
    module = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    module.weight.data.copy_(weight)
    module.requires_grad_(False)
    half = {"sparsity": 0.5, "prune_n": 0, "prune_m": 0}
    pairs = {"sparsity": 0.5, "prune_n": 2, "prune_m": 4}
    more = {"block_size": 128, "dampening_frac": 0.01, "preserve_sparsity_mask": False}
    groups = weight.unflatten(1, (-1, 128))
    scale = (groups.abs().amax(2) * 2 / 15)[None]

    def gptq(order):
        arguments = QuantizationArgs(num_bits=4, group_size=128, symmetric=True, strategy="group", actorder=order)
        zero = torch.zeros_like(scale, dtype=torch.int8)
        return quantize_weight(weight.clone()[None], inputs.hessian.clone()[None], scale, zero, None, arguments)[0][0]

    return {
        "sparsegpt 50 %": lambda: sparsegpt(module, {module: inputs.hessian.clone()}, **half, **more)[1],
        "sparsegpt 2:4": lambda: sparsegpt(module, {module: inputs.hessian.clone()}, **pairs, **more)[1],
        "wanda 50 %": lambda: wanda(module, {module: inputs.square_sum.float()}, **half),
        "wanda 2:4": lambda: wanda(module, {module: inputs.square_sum.float()}, **pairs),
        "gptq int4 g128": lambda: gptq(None),
        "gptq int4 g128 act-order": lambda: gptq(ActivationOrdering.WEIGHT),
    }


def measure(kernels, weight, inputs, repeats):
    """(method, kernel) -> (median seconds, error, share of zeros); the kernels take turns."""
    energy = inputs.output_energy(weight)
    times, facts = {}, {}
    for method in kernels["moeprune"]:
        for _ in range(repeats):
            for kernel, calls in kernels.items():
                if method not in calls:
                    continue
                begin = time.process_time()
                result = calls[method]()
                times.setdefault((method, kernel), []).append(time.process_time() - begin)
                if (method, kernel) not in facts:
                    error = inputs.output_energy(weight - result) / energy
                    facts[method, kernel] = error, 1 - int(torch.count_nonzero(result)) / result.numel()
    return {key: (numbers.median(values), *facts[key]) for key, values in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).with_name("results.csv"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for size in options.sizes:
        weight, inputs = layer(size)
        makers = {"moeprune": ours, "plain rewrite": plainly, "llm-compressor": llm_compressor}
        kernels = {name: maker(weight, inputs) for name, maker in makers.items()}
        for (method, kernel), (seconds, error, zeros) in measure(kernels, weight, inputs, options.repeats).items():
            base = (
                next(row["seconds"] for row in rows if row["method"] == method and row["size"] == size)
                if (kernel != "moeprune")
                else seconds
            )
            rows.append(dict(zip(COLUMNS, (method, size, kernel, seconds, seconds / base, error, zeros), strict=True)))
            print(f"{size:5} {method:26} {kernel:15} {seconds:7.3f} s  x{seconds / base:5.1f}  error {error:.5f}")
    with options.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    print(options.output)


if __name__ == "__main__":
    main()
