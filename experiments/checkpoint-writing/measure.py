"""Time and memory of writing a pruned checkpoint, against `cp` of the bytes that are kept.

    python experiments/checkpoint-writing/measure.py --work /tmp/checkpoint-writing --gib 2 8 --runs 5

Makes a random Qwen3-MoE checkpoint in shards, prunes half of its experts, and alternates: cp, cp and sync, moeprune.
Every measurement is a process of its own that reports its wall time and the peak resident memory the system saw.
"""

import argparse
import csv
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

HIDDEN, WIDTH, EXPERTS, VOCABULARY = 1024, 512, 64, 4096
SETTLE = 1.0  # seconds
EXPERT_BYTES = 3 * HIDDEN * WIDTH * 2
FIELDS = ("gib", "shard_mib", "method", "run", "seconds", "first_byte", "cpu_seconds", "peak_mib", "grown_mib", "bytes")


def make_checkpoint(directory: Path, *, size: int, shard_size: int) -> None:
    """A checkpoint of about `size` bytes in files of about `shard_size`, random bf16 weights, made without a model."""
    from moeprune.artifacts.safetensors_files import header_bytes

    layers = max(1, size // (EXPERTS * EXPERT_BYTES))
    config = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "moe_intermediate_size": WIDTH,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 8,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
    }
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    files: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    filled = 0
    for name, shape in tensors(layers):
        if filled > shard_size:
            files.append([])
            filled = 0
        files[-1].append((name, shape))
        filled += 2 * elements(shape)
    weight_map = {}
    noise = os.urandom(2**24)
    for number, found in enumerate(files, start=1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        weight_map |= {name: file for name, _ in found}
        with (directory / file).open("wb") as out:
            out.write(header_bytes(((n, "BF16", s, 2 * elements(s)) for n, s in found), {"format": "pt"}))
            for _, shape in found:
                for start in range(0, 2 * elements(shape), len(noise)):
                    out.write(noise[: 2 * elements(shape) - start])
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def tensors(layers: int) -> list[tuple[str, tuple[int, ...]]]:
    found = [("model.embed_tokens.weight", (VOCABULARY, HIDDEN)), ("lm_head.weight", (VOCABULARY, HIDDEN))]
    found.append(("model.norm.weight", (HIDDEN,)))
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name, shape in (("q_proj", (1024, HIDDEN)), ("k_proj", (256, HIDDEN)), ("v_proj", (256, HIDDEN))):
            found.append((f"{prefix}self_attn.{name}.weight", shape))
        found.append((f"{prefix}self_attn.o_proj.weight", (HIDDEN, 1024)))
        found += [(f"{prefix}self_attn.{name}.weight", (128,)) for name in ("q_norm", "k_norm")]
        found += [(f"{prefix}{name}.weight", (HIDDEN,)) for name in ("input_layernorm", "post_attention_layernorm")]
        found.append((f"{prefix}mlp.gate.weight", (EXPERTS, HIDDEN)))
        for expert in range(EXPERTS):
            module = f"{prefix}mlp.experts.{expert}."
            found += [(f"{module}{name}.weight", (WIDTH, HIDDEN)) for name in ("gate_proj", "up_proj")]
            found.append((f"{module}down_proj.weight", (HIDDEN, WIDTH)))
    return found


def elements(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result


def make_plan(source: Path, path: Path) -> None:
    """Every other expert of every layer."""
    from moeprune.artifacts.plan import LayerPlan, PrunePlan
    from moeprune.checkpoint.inventory import checkpoint_fingerprint, inventory

    checkpoint = inventory(source)
    layers = tuple(
        LayerPlan(name=la.name, num_experts=EXPERTS, top_k=la.top_k, kept=tuple(range(0, EXPERTS, 2)))
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
    ).save(path)


def measured(method: str, source: Path, kept: Path, plan: Path, out: Path) -> dict[str, float]:
    """Wall seconds and resident memory (MiB) of one copy, in this process; called in a fresh one."""
    import resource

    def peak(who: int) -> float:
        return resource.getrusage(who).ru_maxrss / 1024

    def cpu(who: int) -> float:
        usage = resource.getrusage(who)
        return usage.ru_utime + usage.ru_stime

    if method == "moeprune":
        from transformers import AutoModelForCausalLM  # noqa: F401 (imports are not what is measured)

        from moeprune.artifacts.plan import PrunePlan
        from moeprune.checkpoint.inventory import inventory
        from moeprune.checkpoint.prune import prune_checkpoint

        decision = PrunePlan.load(plan)
        inventory(source)  # transformers imports a model's module when it first needs it
        before, spent = peak(resource.RUSAGE_SELF), cpu(resource.RUSAGE_SELF)
        first: list[float] = []  # when the first bytes were written: before, names and shapes are checked

        def on_progress(done: int, total: int) -> None:
            if not first:
                first.append(time.perf_counter())

        started = time.perf_counter()
        prune_checkpoint(source, decision, out, on_progress=on_progress)
        seconds = time.perf_counter() - started
        after = peak(resource.RUSAGE_SELF)
        spent = cpu(resource.RUSAGE_SELF) - spent
        times = {"seconds": seconds, "first_byte": first[0] - started, "cpu_seconds": spent}
        return {**times, "peak_mib": after, "grown_mib": after - before}
    started = time.perf_counter()
    subprocess.run(["cp", "-r", str(kept), str(out)], check=True)
    if method == "cp+sync":
        subprocess.run(["sync", *map(str, out.iterdir())], check=True)
    seconds = time.perf_counter() - started
    spent = cpu(resource.RUSAGE_CHILDREN)
    times = {"seconds": seconds, "first_byte": 0.0, "cpu_seconds": spent}
    return {**times, "peak_mib": peak(resource.RUSAGE_CHILDREN), "grown_mib": 0.0}


def run(arguments: argparse.Namespace) -> list[dict[str, object]]:
    work, rows = arguments.work, []
    for gib, shard_mib in itertools.product(arguments.gib, arguments.shard_mib):
        shutil.rmtree(work, ignore_errors=True)
        source, kept, plan, out = work / "source", work / "kept", work / "plan.json", work / "out"
        make_checkpoint(source, size=int(gib * 2**30), shard_size=shard_mib * 2**20)
        make_plan(source, plan)
        measured("moeprune", source, kept, plan, kept)  # what cp then copies: exactly the bytes that are kept
        size = sum(path.stat().st_size for path in kept.iterdir())
        for number in range(arguments.runs):
            for method in ("cp", "moeprune", "cp+sync"):
                shutil.rmtree(out, ignore_errors=True)
                subprocess.run(["sync"], check=True)
                time.sleep(SETTLE)  # the disk is still busy with what was removed
                command = [sys.executable, __file__, "--work", str(work), "--one", method]
                found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                rows.append(
                    {"gib": gib, "shard_mib": shard_mib, "method": method, "run": number, **found, "bytes": size}
                )
                print(rows[-1], flush=True)
    shutil.rmtree(work)
    return rows


def summary(rows: list[dict[str, object]]) -> str:
    head = ("kept", "file size", "method", "seconds: median (least - most)", "of them before the first byte")
    head += ("CPU seconds", "times cp", "times cp+sync", "memory grown")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for gib, shard_mib in dict.fromkeys((row["gib"], row["shard_mib"]) for row in rows):
        chosen = [row for row in rows if (row["gib"], row["shard_mib"]) == (gib, shard_mib)]

        def values(method: str, field: str, chosen: list[dict[str, object]] = chosen) -> list[float]:
            return [float(str(row[field])) for row in chosen if row["method"] == method]

        medians = {method: statistics.median(values(method, "seconds")) for method in ("cp", "cp+sync", "moeprune")}
        for method, median in medians.items():
            seconds, ours = values(method, "seconds"), method == "moeprune"
            first = f"{statistics.median(values(method, 'first_byte')):.2f}" if ours else ""
            grown = f"{max(values(method, 'grown_mib')):.0f} MiB" if ours else ""
            lines.append(
                f"| {float(str(chosen[0]['bytes'])) / 2**30:.1f} GiB | {shard_mib} MiB | {method} | "
                f"{median:.2f} ({min(seconds):.2f} - {max(seconds):.2f}) | {first} | "
                f"{statistics.median(values(method, 'cpu_seconds')):.2f} | {median / medians['cp']:.2f} | "
                f"{median / medians['cp+sync']:.2f} | "
                f"{grown} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="a directory that may be deleted")
    parser.add_argument("--gib", type=float, nargs="+", default=[2.0, 8.0], help="sizes of the source")
    parser.add_argument("--shard-mib", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None, help="a csv file for the rows")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    work = arguments.work
    if arguments.one:
        print(json.dumps(measured(arguments.one, work / "source", work / "kept", work / "plan.json", work / "out")))
        return
    rows = run(arguments)
    if arguments.out is not None:
        with arguments.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows(rows)
    print(summary(rows))


if __name__ == "__main__":
    main()
