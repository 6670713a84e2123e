"""CPU time of a recorded pass over a plain forward of the same batches, one thread, alternating.

python experiments/recording-cost/benchmark.py [--rounds 15] [--out experiments/recording-cost/results.csv]

The model: hidden 256, 4 layers, 32 experts, top-4, expert width 128, random weights, float32. The data: 64 sequences of
256 tokens. Both passes go through the decoder without lm_head. `hooks` sees every expert's output and adds nothing up;
`naive` is what a first draft would write: one matmul per expert on the tokens routed to it beside the model's own.
"""

import argparse
import csv
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moeprune.models.layers import find_moe_layers
from moeprune.recording.accumulate import LayerSums
from moeprune.recording.hooks import observed

SEQUENCES, LENGTH = 64, 256


def build() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=4096,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        moe_intermediate_size=128,
        num_experts=32,
        num_experts_per_tok=4,
    )
    return Qwen3MoeForCausalLM(config).eval()


def passes(model: Qwen3MoeForCausalLM, batch_tokens: int) -> dict[str, Callable[[], None]]:
    ids = torch.randint(0, 4096, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(1))
    batches = ids.split(batch_tokens // LENGTH)
    layers = find_moe_layers(model)

    def plain() -> None:
        for batch in batches:
            model.model(input_ids=batch, attention_mask=torch.ones_like(batch), use_cache=False)

    def recorded(choice: str) -> Callable[[], None]:
        sums = {
            layer.name: LayerSums(layer.info, device=torch.device("cpu"), hidden=256, statistics=choice)
            for layer in layers
        }

        def work() -> None:
            with observed(layers, lambda layer, rows, *seen: sums[layer.name].add(*seen, None)):
                plain()

        return work

    def hooks() -> None:
        with observed(layers, lambda *_: None):
            plain()

    def naive() -> None:
        handles = [layer.experts.register_forward_pre_hook(_recompute(layer.info.num_experts)) for layer in layers]
        plain()
        for handle in handles:
            handle.remove()

    return {"plain": plain, "hooks": hooks, "default": recorded("default"), "all": recorded("all"), "naive": naive}


def _recompute(num_experts: int) -> Callable[..., None]:
    def hook(experts: torch.nn.Module, args: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        hidden, index, weights = args
        gated = torch.zeros(len(hidden), num_experts)
        for expert in range(num_experts):
            tokens, slot = (index == expert).nonzero(as_tuple=True)
            gate, up = (hidden[tokens] @ experts.gate_up_proj[expert].T).chunk(2, -1)
            output = (experts.act_fn(gate) * up) @ experts.down_proj[expert].T
            gated[tokens, expert] = weights[tokens, slot] * output.norm(dim=-1)
        gated.double().T @ gated.double()

    return hook


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.csv"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = build()
    with options.out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["batch_tokens", "pass", "median_seconds", "ratio_median", "ratio_low", "ratio_high"])
        for batch_tokens in (2048, 8192):
            for name, row in compare(passes(model, batch_tokens), options.rounds).items():
                writer.writerow([batch_tokens, name, *(f"{value:.3f}" for value in row)])
                print(f"{batch_tokens} {name:8s} {row[0]:.3f} s  {row[1]:.3f} of plain [{row[2]:.3f}, {row[3]:.3f}]")


def compare(work: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Pass -> [median seconds, median, lowest and highest ratio to the plain pass of the same round]."""
    for run in work.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for round_number in range(rounds):
        for name in list(work)[:: 1 if round_number % 2 else -1]:
            started = time.process_time()
            work[name]()
            seconds[name].append(time.process_time() - started)
    rows = {}
    for name, values in seconds.items():
        ratios = sorted(value / base for value, base in zip(values, seconds["plain"], strict=True))
        rows[name] = [statistics.median(values), statistics.median(ratios), ratios[0], ratios[-1]]
    return rows


if __name__ == "__main__":
    main()
