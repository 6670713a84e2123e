"""Train a small Qwen3-MoE on the encoded corpus, for a budget of tokens or of seconds.

    python train.py corpus tokenizer -o run --tokens 25e6
    torchrun --nproc-per-node 2 train.py corpus tokenizer -o run --seconds 10800
    python train.py corpus tokenizer -o run64 --tokens 25e6 --experts 64 --top-k 8 --expert-width 32

Writes run/training-curve.json while it runs and, at the end, run/model: a bfloat16 checkpoint with hub names. Stopped
at any moment, the same command goes on from run/state.pt; with --tokens it ends where an uninterrupted run would have.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM
from windows import WINDOW, Windows

PEAK_RATE, FINAL_SHARE, WARMUP_STEPS = 3e-3, 0.03, 100
BALANCE = 0.005  # weight of the load-balancing loss, a layer


@dataclass
class Progress:
    """What a resumed run needs beside weights and optimiser."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float | None = None  # moving average of the training loss
    curve: list[dict[str, Any]] = field(default_factory=list)


def new_model(options: argparse.Namespace, vocabulary: int) -> Any:
    config = Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.heads // 2,
        head_dim=options.hidden // options.heads,
        intermediate_size=2 * options.hidden,
        moe_intermediate_size=options.expert_width,
        num_experts=options.experts,
        num_experts_per_tok=options.top_k,
        norm_topk_prob=True,
        router_aux_loss_coef=BALANCE,
        mlp_only_layers=[],
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.04,
        bos_token_id=None,
        eos_token_id=3,
        pad_token_id=1,
    )
    torch.manual_seed(options.seed)
    return Qwen3MoeForCausalLM(config)


@contextmanager
def routing_of(model: nn.Module) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """A list that every forward pass appends to, a layer: router logits (tokens, experts), chosen (tokens, top_k)."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [gate.register_forward_hook(lambda _, __, output: seen.append((output[0], output[2]))) for gate in gates]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def balance_loss(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """experts * sum_e (mean probability of e) * (share of slots that chose e): 1 when even (arXiv:2101.03961)."""
    experts = logits.shape[-1]
    probability = logits.float().softmax(-1).mean(0)
    share = torch.bincount(chosen.reshape(-1), minlength=experts).float() / chosen.numel()
    return experts * (probability * share).sum()


def cross_entropy(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Mean next-token loss over the windows (batch, WINDOW)."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))


@torch.no_grad()
def perplexities(model: nn.Module, data: Windows, windows: int) -> dict[str, float]:
    """Validation perplexity by domain."""
    model.eval()
    device = next(model.parameters()).device
    losses = {domain: cross_entropy(model, data.validation(domain, windows).to(device)) for domain in data.domains}
    model.train()
    return {domain: round(math.exp(loss.item()), 2) for domain, loss in losses.items()}


def rate_at(step: int, done: float) -> float:
    """Learning rate: linear warm-up, then a cosine over the share of the budget that is done."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return PEAK_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * (FINAL_SHARE + (1 - FINAL_SHARE) * cosine)


def average_gradients(model: nn.Module, stop: bool) -> bool:
    """Gradients averaged over the processes, in place; True when any process wants to stop.

    One flat all-reduce: an expert that no local token chose has no gradient here, but may have one elsewhere.
    """
    parameters = list(model.parameters())
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
    flat = torch.cat([*(gradient.reshape(-1).cpu() for gradient in gradients), torch.tensor([float(stop)])])
    dist.all_reduce(flat)
    stop, flat = bool(flat[-1] > 0), flat[:-1] / dist.get_world_size()
    for parameter, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = piece.view_as(parameter).to(parameter.device)
    return stop


class Run:
    """One training run: its parts, how far it is, and its files."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.rank, self.processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
        self.data = Windows(options.corpus, options.seed, self.rank)
        self.model = new_model(options, len(self.tokenizer)).to(options.device).train()
        groups = [
            {"params": [p for p in self.model.parameters() if p.ndim >= 2], "weight_decay": 0.05},
            {"params": [p for p in self.model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95))
        self.progress = Progress()
        self.state = options.output / "state.pt"
        self.identity = {name: getattr(options, name) for name in IDENTITY} | {"processes": self.processes}
        if self.state.is_file():
            self._restore()

    def train(self) -> Path:
        """The directory of the trained model; nothing is done when it is there already."""
        target = self.options.output / "model"
        if target.is_dir():
            return target
        started = time.monotonic() - self.progress.seconds
        next_report = self.progress.seconds + self.options.report_every
        with routing_of(self.model) as routing:
            while not self.step(routing):
                self.progress.seconds = time.monotonic() - started
                if self.progress.seconds >= next_report:
                    next_report += self.options.report_every
                    self.report(windows=8)
        self.progress.seconds = time.monotonic() - started
        self.report(windows=40)
        if self.rank == 0:
            save_checkpoint(self.model, self.tokenizer, target)
        return target

    def step(self, routing: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
        """One update. True when the budget is spent."""
        options, progress = self.options, self.progress
        done = progress.tokens / options.tokens if options.tokens else progress.seconds / options.seconds
        for group in self.optimizer.param_groups:
            group["lr"] = rate_at(progress.step, done)
        ids = self.data.batch(progress.step, options.batch).to(options.device)
        routing.clear()
        loss = cross_entropy(self.model, ids)
        (loss + BALANCE * sum(balance_loss(*layer) for layer in routing)).backward()
        progress.step += 1
        progress.tokens += ids.numel() * self.processes
        stop = progress.tokens >= options.tokens if options.tokens else done >= 1
        if self.processes > 1:
            stop = average_gradients(self.model, stop)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        progress.loss = loss.item() if progress.loss is None else 0.98 * progress.loss + 0.02 * loss.item()
        return stop

    def report(self, windows: int) -> None:
        """A point of the curve and, on disk, everything a resumed run needs."""
        if self.rank != 0:
            return
        progress = self.progress
        point = {"seconds": round(progress.seconds), "step": progress.step, "tokens": progress.tokens}
        point |= {"loss": round(progress.loss or 0.0, 3), "windows": windows}
        point["perplexity"] = perplexities(self.model, self.data, windows)
        progress.curve.append(point)
        print(json.dumps(point), flush=True)
        self.options.output.mkdir(parents=True, exist_ok=True)
        (self.options.output / "training-curve.json").write_text(json.dumps(progress.curve, indent=1) + "\n")
        state = {"identity": self.identity, "progress": vars(progress)}
        state |= {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        beside = self.state.with_suffix(".new")
        torch.save(state, beside)
        os.replace(beside, self.state)

    def _restore(self) -> None:
        state = torch.load(self.state, map_location="cpu", weights_only=True)
        if state["identity"] != self.identity:
            raise ValueError(
                f"{self.state} is of another run: {state['identity']}, not {self.identity}; give another -o"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])


def save_checkpoint(model: Any, tokenizer: Any, directory: Path) -> None:
    """A bfloat16 checkpoint with the names hub checkpoints have; transformers 5 would write others into config.json."""
    beside = directory.with_suffix(".new")
    model.to(torch.bfloat16).save_pretrained(beside)
    tokenizer.save_pretrained(beside)
    config = json.loads((beside / "config.json").read_text())
    if "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    config["rope_theta"] = config.pop("rope_parameters", {"rope_theta": 10000.0})["rope_theta"]
    config["torch_dtype"] = config.pop("dtype")
    (beside / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    beside.rename(directory)


# What must be the same for a run to go on from a state; the budget may change.
IDENTITY = ("layers", "hidden", "heads", "experts", "top_k", "expert_width", "seed", "batch")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("run"))
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--tokens", type=float, help="train on that many tokens, all processes together")
    budget.add_argument("--seconds", type=float, help="train for that long")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--expert-width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=6, help=f"windows of {WINDOW} tokens a step and process")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--report-every", type=float, default=300, metavar="SECONDS")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
    print(Run(options).train())
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
