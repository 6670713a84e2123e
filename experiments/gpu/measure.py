"""What recording costs on a GPU, what pruning saves there, and what 2:4 sparsity does to attention's matrices.

    python experiments/gpu/measure.py -o experiments/gpu          # on a GPU with 24 GB or more; about five minutes
    python experiments/gpu/measure.py --device cpu --small -o DIR  # a smoke run: numbers without meaning

The model has the layers of Qwen3-30B-A3B (hidden 2048, 128 experts, top-8, expert width 768, 32 query and 4 key heads)
with random weights in bfloat16, fewer of them. Writes recording.csv, pruning.csv and sparse.csv, and prints them.
"""

import argparse
import csv
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moeprune as mp
from moeprune.data.trajectories import TokenSet
from moeprune.evaluation.speed import speed
from moeprune.evaluation.students import pruned_students
from moeprune.models.layers import find_moe_layers
from moeprune.recording.accumulate import LayerSums
from moeprune.recording.hooks import observed

Row = dict[str, Any]


def build(device: torch.device, *, small: bool) -> Any:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=4096,
        hidden_size=256 if small else 2048,
        num_hidden_layers=2 if small else 8,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=16 if small else 128,
        moe_intermediate_size=32 if small else 768,
        num_experts=16 if small else 128,
        num_experts_per_tok=8,
        max_position_embeddings=4096,
    )
    with torch.device(device):
        model = Qwen3MoeForCausalLM(config)
    return model.to(torch.bfloat16).eval()


def seconds_of(work: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def alternated(work: dict[str, Callable[[], None]], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Name -> seconds of every round, in reverse order every second time; the first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(-1, rounds):
        for name in list(work)[:: 1 if turn % 2 else -1]:
            taken = seconds_of(work[name], device)
            if turn >= 0:
                seconds[name].append(taken)
    return seconds


def ratios(seconds: dict[str, list[float]], base: str) -> Iterator[Row]:
    for name, values in seconds.items():
        shares = sorted(value / other for value, other in zip(values, seconds[base], strict=True))
        median = statistics.median(values)
        yield {"of": name, "seconds": median, "ratio": statistics.median(shares), "low": shares[0], "high": shares[-1]}


@torch.no_grad()
def recording(model: Any, device: torch.device, *, small: bool, rounds: int) -> list[Row]:
    """Passes over 64 x 512 tokens in batches of 8192, through the decoder alone: plain, default and all statistics."""
    ids = torch.randint(0, 4096, (8 if small else 64, 512), generator=torch.Generator().manual_seed(1)).to(device)
    layers = find_moe_layers(model)

    def plain() -> None:
        for batch in ids.split(16):
            model.model(input_ids=batch, attention_mask=torch.ones_like(batch), use_cache=False)

    def recorded(choice: Any) -> Callable[[], None]:
        hidden = model.config.hidden_size
        sums = {y.name: LayerSums(y.info, device=device, hidden=hidden, statistics=choice) for y in layers}

        def work() -> None:
            with observed(layers, lambda layer, rows, *seen: sums[layer.name].add(*seen, None)):
                plain()

        return work

    work = {"plain": plain, "default": recorded("default"), "all": recorded("all")}
    rows = list(ratios(alternated(work, device, rounds), "plain"))
    return [row | {"tokens a second": ids.numel() / row["seconds"]} for row in rows]


def pruning(model: Any, tokens: TokenSet, rounds: int) -> list[Row]:
    """Speed and memory of the model at 25, 50 and 75 %, alternating with the whole one."""
    statistics_ = mp.record(model, tokens)
    experts = model.config.num_experts
    shares = [share for share in (0.25, 0.5, 0.75) if experts * (1 - share) >= model.config.num_experts_per_tok]
    plans = {
        f"{share:.0%}": mp.select(statistics_, mp.SelectionOptions.parse({"budget": {"prune": share}}))
        for share in shares
    }
    return [
        {"pruned": label} | figures
        for label, figures in speed(model, pruned_students(model, plans), tokens, repeats=rounds).items()
    ]


@torch.no_grad()
def sparse(device: torch.device, *, small: bool, rounds: int) -> list[Row]:
    """x W' for attention's matrices, 2:4 sparse in torch's semi-structured form against dense, by tokens a call."""
    rows: list[Row] = []
    if device.type != "cuda":
        return rows
    for name, shape in {"q": (4096, 2048), "kv": (512, 2048), "o": (2048, 4096)}.items():
        weight = torch.randn(shape, device=device, dtype=torch.bfloat16)
        keep = weight.abs().view(-1, 4).argsort(dim=-1, descending=True)[:, :2]
        mask = torch.zeros_like(weight.view(-1, 4)).scatter_(1, keep, 1).view(shape)
        packed = torch.sparse.to_sparse_semi_structured(weight * mask)
        for count in (16, 256) if small else (16, 256, 4096):
            x = torch.randn(count, shape[1], device=device, dtype=torch.bfloat16)

            def dense(x: torch.Tensor = x, weight: torch.Tensor = weight) -> None:
                for _ in range(100):
                    torch.nn.functional.linear(x, weight)

            def two_of_four(x: torch.Tensor = x, packed: torch.Tensor = packed) -> None:
                for _ in range(100):
                    torch.nn.functional.linear(x, packed)

            seconds = alternated({"dense": dense, "2:4": two_of_four}, device, rounds)
            rows += [{"matrix": name, "tokens": count} | row for row in ratios(seconds, "dense")]
    return rows


def write(path: Path, rows: list[Row]) -> None:
    if not rows:
        print(f"{path.name}: nothing was measured on this device")
        return
    with path.open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
            print(path.name, {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--small", action="store_true", help="a smoke run: a tiny model, numbers without meaning")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    model = build(device, small=arguments.small)
    tokenizer = mp.load_model(mp.ModelOptions(path="reference")).tokenizer
    domains = [
        mp.Domain(name=n, path=f"reference:{n}", tokens=1024 if arguments.small else 16_384) for n in ("agent", "c")
    ]
    tokens = mp.load_tokens(domains, tokenizer, part="calibration")
    arguments.output.mkdir(parents=True, exist_ok=True)
    options = {"small": arguments.small, "rounds": arguments.rounds}
    write(arguments.output / "recording.csv", recording(model, device, **options))
    write(arguments.output / "pruning.csv", pruning(model, tokens, arguments.rounds))
    write(arguments.output / "sparse.csv", sparse(device, **options))


if __name__ == "__main__":
    main()
