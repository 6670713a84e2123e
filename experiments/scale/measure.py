"""Memory and time of recording, streaming, compressing and writing, against the number of layers and of experts.

    OMP_NUM_THREADS=1 python experiments/scale/measure.py --work /tmp/scale --runs 2 --out experiments/scale/results.csv

Random Qwen3-MoE checkpoints in bfloat16. Every measurement is a process of its own (forked, so that imports are not
waited for), which takes a tiny model through the same code first, and reports wall and CPU seconds and the peak
resident memory over what it had then, as the system saw it. In memory the plain forward and the recorded pass share a
process; their seconds leave loading out, and their peak holds the loaded weights. `cp` copies the bytes that the
pruned checkpoint has.
"""

import argparse
import csv
import json
import math
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HIDDEN, WIDTH, TOP_K, VOCABULARY = 256, 128, 4, 2048
POINTS = [(8, 32), (24, 32), (48, 32), (24, 64), (24, 128)]  # layers, experts
WAYS = ("in memory", "record streamed", "compress streamed", "write", "cp")
FIELDS = ("layers", "experts", "way", "run", "seconds", "cpu_seconds", "peak_mib", "weights_mib", "layer_mib")
FIELDS += ("tokens", "predicted_seconds", "predicted_mib", "predicted_streamed_mib")


def make_checkpoint(directory: Path, *, layers: int, experts: int, hidden: int = HIDDEN, width: int = WIDTH) -> None:
    """Weights of a random model, layer by layer, in files of about 256 MB."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        moe_intermediate_size=width,
        num_experts=experts,
        num_experts_per_tok=TOP_K,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=VOCABULARY,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory, max_shard_size="256MB")


def calibration(tokens: int) -> Any:
    """Random tokens in sequences of 256."""
    import numpy as np

    from moeprune.data.trajectories import Sequence, TokenSet

    generator = np.random.default_rng(0)
    pieces = []
    for number in range(tokens // 256):
        ids = generator.integers(10, VOCABULARY, size=256).astype(np.int32)
        pieces.append(Sequence(ids, np.ones(256, bool), "random", f"{number:064x}"))
    return TokenSet(tuple(pieces), {"random": {"tokens": tokens, "counted": tokens}})


def carry_out(way: str, source: Path, tokens: Any, out: Path) -> None:
    """One of WAYS, on the checkpoint in `source`."""
    from moeprune.checkpoint.inventory import checkpoint_fingerprint, inventory
    from moeprune.models.loading import ModelOptions
    from moeprune.models.streaming.model import open_streamed

    options = ModelOptions(path=str(source))
    if way == "record streamed":
        from moeprune.recording.streamed import record_streamed

        fingerprint = checkpoint_fingerprint(inventory(source))
        record_streamed(open_streamed(options, device="cpu"), tokens, fingerprint=fingerprint)
    elif way == "compress streamed":
        from moeprune.dense.compress import compress_checkpoint
        from moeprune.dense.methods.pruning import SparseGPT

        methods = [SparseGPT(targets=("attention",), minimum_tokens=1)]
        compress_checkpoint(source, out, methods, tokens, device="cpu", streaming="on")
    else:
        from moeprune.artifacts.plan import PrunePlan
        from moeprune.checkpoint.prune import prune_checkpoint

        prune_checkpoint(source, PrunePlan.load(plan_of(source)), out)


def in_memory(source: Path, tokens: Any) -> dict[str, dict[str, float]]:
    """A plain forward and a recorded pass of the same batches, seconds without loading."""
    from moeprune.models.loading import align, pretrained

    before = resident("VmRSS")
    model = pretrained(source, "auto", device="cpu")
    align(model)
    plain, recorded = timed(lambda: plain_forward(model, tokens)), timed(lambda: record_whole(model, tokens))
    peak = {"peak_mib": resident("VmHWM") - before}
    return {"plain forward": plain | peak, "record in memory": recorded | peak}


def plain_forward(model: Any, tokens: Any) -> None:
    import torch

    from moeprune.data.trajectories import collate, plan_batches
    from moeprune.models.memory import keep_freed_memory

    keep_freed_memory()
    with torch.no_grad():
        for batch in plan_batches(tokens.sequences, 2048):
            ids, attention, _ = collate([tokens.sequences[index] for index in batch])
            model.base_model(input_ids=ids, attention_mask=attention, use_cache=False)


def record_whole(model: Any, tokens: Any) -> None:
    from moeprune.recording.recorder import record

    record(model, tokens, batch_tokens=2048)


def plan_of(source: Path) -> Path:
    return source.with_suffix(".plan.json")


def make_plan(source: Path) -> None:
    """Every other expert of every layer."""
    from moeprune.artifacts.plan import LayerPlan, PrunePlan
    from moeprune.checkpoint.inventory import checkpoint_fingerprint, inventory

    checkpoint = inventory(source)
    layers = tuple(
        LayerPlan(name=la.name, num_experts=la.num_experts, top_k=la.top_k, kept=tuple(range(0, la.num_experts, 2)))
        for la in checkpoint.layers
    )
    PrunePlan(
        model_type="qwen3_moe",
        model_fingerprint=checkpoint_fingerprint(checkpoint),
        statistics_key="none",
        criterion={"name": "random"},
        solver={},
        budget={"prune": 0.5},
        mix={},
        layers=layers,
    ).save(plan_of(source))


def resident(entry: str) -> float:
    """VmRSS or VmHWM (the highest so far) of this process, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{entry}:")) / 1024


def measured(way: str, source: Path, work: Path, tokens: Any) -> dict[str, dict[str, float]]:
    """What is measured -> seconds and memory, in this process."""
    out = work / "out"
    shutil.rmtree(out, ignore_errors=True)
    if way == "cp":
        copy = ["cp", "-r", str(work / "kept"), str(out)]
        return {way: timed(lambda: subprocess.run(copy, check=True), children=True)}
    warm_up(way, work)
    if way == "in memory":
        return in_memory(source, tokens)
    return {way: timed(lambda: carry_out(way, source, tokens, out))}


def warm_up(way: str, work: Path) -> None:
    """The same on a tiny model, so that code that is loaded when it is first used does not count."""
    small = work / "small"
    if way == "in memory":
        in_memory(small, calibration(512))
        Path("/proc/self/clear_refs").write_text("5")
        return
    carry_out(way, small, calibration(512), work / "out")
    shutil.rmtree(work / "out", ignore_errors=True)


def in_a_child(action: Callable[[], Any]) -> Any:
    """What the action returns, as JSON holds it, from a process that is forked for it."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            with os.fdopen(writing, "w") as pipe:
                json.dump(action(), pipe)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    return json.loads(told)


def timed(action: Callable[[], Any], *, children: bool = False) -> dict[str, float]:
    who = resource.RUSAGE_CHILDREN if children else resource.RUSAGE_SELF

    def cpu() -> float:
        usage = resource.getrusage(who)
        return usage.ru_utime + usage.ru_stime

    Path("/proc/self/clear_refs").write_text("5")
    before, spent, started = resident("VmRSS"), cpu(), time.perf_counter()
    action()
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "cpu_seconds": cpu() - spent, "peak_mib": resident("VmHWM") - before}


def predicted(source: Path, tokens: int) -> dict[str, float]:
    """What `moeprune check` would say of a recording: bytes of weights and statistics, and seconds."""
    from types import SimpleNamespace

    from moeprune.checkpoint.inventory import inventory
    from moeprune.commands.check import estimate_pass

    config = SimpleNamespace(model=SimpleNamespace(dtype="auto"), calibration=SimpleNamespace(domains=["random"]))
    inputs = SimpleNamespace(
        checkpoint=inventory(source), device_type="cpu", config=config, calibration=SimpleNamespace(tokens=tokens)
    )
    told = estimate_pass(inputs)  # type: ignore[arg-type]
    return {
        "predicted_seconds": told["seconds"],
        "predicted_mib": (told["weight_bytes"] + told["statistics_bytes"]) / 2**20,
        "predicted_streamed_mib": (told["streamed_bytes"] + told["statistics_bytes"]) / 2**20,
    }


def sizes(source: Path) -> dict[str, float]:
    """MiB of all weights and of the largest decoder layer, in float32."""
    from moeprune.checkpoint.inventory import inventory

    shapes = inventory(source).memory.shapes
    layer = sum(math.prod(shape) for name, shape in shapes.items() if name.startswith("model.layers.0."))
    return {"weights_mib": sum(map(math.prod, shapes.values())) * 4 / 2**20, "layer_mib": layer * 4 / 2**20}


def run(arguments: argparse.Namespace) -> None:
    """Append the rows of every round to the csv file, so that a run that is stopped keeps what it has."""
    import torch

    torch.set_num_threads(1)
    work = arguments.work
    shutil.rmtree(work, ignore_errors=True)
    make_checkpoint(work / "small", layers=2, experts=8, hidden=64)
    make_plan(work / "small")
    for way in WAYS[:-1]:
        warm_up(way, work)
    with arguments.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        for number in range(arguments.runs):
            for layers, experts in POINTS:
                for row in one_round(work, layers, experts, arguments.tokens):
                    writer.writerow({"run": number, **row})
                    file.flush()
                    print(row, flush=True)
    shutil.rmtree(work)


def one_round(work: Path, layers: int, experts: int, tokens: int) -> Iterator[dict[str, Any]]:
    """Every way, once, on a checkpoint of this size."""
    source = work / f"source-{layers}-{experts}"
    for directory in (source, work / "kept"):
        shutil.rmtree(directory, ignore_errors=True)
    told = in_a_child(lambda: prepared(source, work / "kept", layers, experts))
    told = {"layers": layers, "experts": experts, "tokens": tokens, **told}
    data = calibration(tokens)
    for way in WAYS:
        found = in_a_child(lambda way=way: measured(way, source, work, data))
        for name, values in found.items():
            expected = in_a_child(lambda: predicted(source, tokens)) if name == "record in memory" else {}
            yield {"way": name, **told, **values, **expected}
    shutil.rmtree(source)


def prepared(source: Path, kept: Path, layers: int, experts: int) -> dict[str, float]:
    """Makes the checkpoint, its plan, and the bytes that `cp` copies; sizes of the model."""
    from moeprune.artifacts.plan import PrunePlan
    from moeprune.checkpoint.prune import prune_checkpoint

    make_checkpoint(source, layers=layers, experts=experts)
    make_plan(source)
    prune_checkpoint(source, PrunePlan.load(plan_of(source)), kept)
    return sizes(source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="a directory that may be deleted")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--out", type=Path, default=Path("results.csv"), help="a csv file for the rows")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    run(arguments)


if __name__ == "__main__":
    main()
