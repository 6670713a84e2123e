"""`moeprune check`: everything that can be known before weights are loaded.

Calibration data as a person looks at it: a table of counts, and an example with what counts set apart.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeprune.artifacts.errors import InputError
from moeprune.checkpoint.inventory import Inventory
from moeprune.config.grid_file import is_grid, load_grid
from moeprune.config.load import load_run
from moeprune.console import say, warn
from moeprune.data.trajectories import Sequence as TokenSequence
from moeprune.data.trajectories import TokenSet
from moeprune.models.engine_limits import MTP_KEYS, notes
from moeprune.models.loading import (
    number_bytes,
)
from moeprune.models.options import ModelOptions
from moeprune.run.directory import STAGES
from moeprune.run.opened import Inputs, shared_inputs
from moeprune.run.pipeline import require
from moeprune.selection.budget import layer_budgets


def check_file(path: Path, overrides: Sequence[str], *, memory: str | None = None) -> dict[str, Any]:
    """What a run of this config would do: model, budget by layer, data by domain, memory and time of the pass.

    Raises InputError for everything that would stop the run.
    """
    limit = None if memory is None else parse_bytes(memory)
    if is_grid(path):
        return _check_grid(path, overrides, limit)
    config = load_run(path, overrides)
    inputs = Inputs(config)
    inputs.inspect()
    require(inputs, STAGES)
    say(f"model: {config.model.path} ({inputs.checkpoint.config['model_type']}), fingerprint {inputs.fingerprint}")
    budgets = layer_budgets(inputs.layers, config.selection.budget)
    spread = config.selection.budget.scope == "global"
    for budget in [] if spread else budgets:
        say(f"budget: {budget}")
    if spread:
        total = sum(budget.layer.num_experts for budget in budgets)
        say(f"budget: {sum(b.pruned for b in budgets):,} of {total:,} experts go, spread over the layers by cost")
    shipping = [] if spread else _shipping(inputs, [budget.kept for budget in budgets])
    data = {part: _describe_data(inputs, part) for part in ("calibration", "evaluation")}
    estimate = estimate_pass(inputs)
    say(
        f"estimate: {estimate['weight_bytes'] / 1e9:.2f} GB of weights in memory "
        f"({inputs.loading_bytes / 1e9:.2f} GB at most while they load), "
        f"{estimate['statistics_bytes'] / 1e6:,.1f} MB of statistics; recording {estimate['tokens']:,} tokens takes "
        f"about {estimate['seconds']:,.0f} s on this machine"
    )
    say(
        f"estimate: read layer by layer (runtime.streaming), {estimate['streamed_bytes'] / 1e9:.2f} GB of memory and "
        f"{estimate['read_bytes'] / 1e9:.2f} GB from disk"
    )
    summary: dict[str, Any] = {
        "config": config.model_dump(mode="json"),
        "model": {"model_type": inputs.checkpoint.config["model_type"], "fingerprint": inputs.fingerprint},
        "budget": [
            {"layer": b.layer.name, "num_experts": b.layer.num_experts, "kept": None if spread else b.kept}
            for b in budgets
        ],
        "serving": shipping,
        "data": data,
        "estimate": estimate,
    }
    if limit is not None:
        summary["fits"] = fitting(inputs, limit)
    return summary


def _shipping(inputs: Inputs, kept: Sequence[int]) -> list[str]:
    """What serving engines would do with these counts; layers of multi-token prediction are the writer's to judge."""
    config = {**inputs.checkpoint.config, **dict.fromkeys(MTP_KEYS, 0)}
    found = [str(note) for note in notes(config, kept, top_k=max(layer.top_k for layer in inputs.layers))]
    for text in found:
        warn(text)
    return found


def _check_grid(path: Path, overrides: Sequence[str], memory: int | None) -> dict[str, Any]:
    """The names of a grid's runs, each with a model and a budget that work; what of each model fits."""
    runs = load_grid(path, overrides)
    loaded: dict[str, Inputs] = {}
    models: dict[ModelOptions, Inputs] = {}
    for config in runs.values():
        inputs = shared_inputs(config, loaded)
        models.setdefault(config.model, inputs)
        inputs.inspect()
        require(inputs, STAGES)
    for name in runs:
        say(f"run: {name}")
    summary: dict[str, Any] = {"runs": list(runs)}
    if memory is not None:
        summary["fits"] = {
            "@".join(filter(None, (options.path, options.revision))): fitting(inputs, memory)
            for options, inputs in models.items()
        }
    return summary


def _describe_data(inputs: Inputs, part: str) -> dict[str, Any]:
    from rich.console import Console

    tokens = inputs.calibration if part == "calibration" else inputs.evaluation
    for warning in tokens.warnings:
        warn(warning)
    console = Console(stderr=True)
    table = describe(tokens)
    table.title = f"{part} data"
    console.print(table)
    if part == "calibration":
        for domain in tokens.manifest:
            say(f"{domain}: what counts of one trajectory")
            console.print(example(tokens, inputs.tokenizer, domain))
    return {name: dict(told) for name, told in tokens.manifest.items()}


def estimate_pass(inputs: Inputs) -> dict[str, Any]:
    """Bytes of weights and statistics, and the seconds a recording would take at this machine's matrix speed.

    streamed_bytes: memory of a pass that reads the weights (read_bytes, once) layer by layer.
    """
    checkpoint = inputs.checkpoint
    elements = {"expert": 0, "other": 0}
    for tensor in checkpoint.tensors:
        elements["expert" if tensor.role in ("expert", "fused") else "other"] += tensor.entry.elements
    width = number_bytes(inputs.config.model.dtype, inputs.device_type)
    layers = checkpoint.layers
    used = sum(layer.top_k / layer.num_experts for layer in layers) / len(layers)
    tokens = inputs.calibration.tokens
    operations = 2 * tokens * (elements["expert"] * used + elements["other"])
    domains = len(inputs.config.calibration.domains)
    cells = sum(3 * layer.num_experts**2 + 6 * layer.num_experts for layer in layers)
    return {
        "weight_bytes": width * sum(elements.values()),
        "streamed_bytes": streamed_bytes(checkpoint, width),
        "read_bytes": sum(tensor.entry.size for tensor in checkpoint.tensors),
        "statistics_bytes": 2 * 8 * domains * cells,
        "tokens": tokens,
        "seconds": operations / _operations_per_second(inputs.device_type),
    }


def streamed_bytes(checkpoint: Inventory, width: int) -> int:
    """Memory of a layer-major pass: the largest layer, half of it for what computes and an eighth for what waits."""
    from moeprune.models.layers import decoder_layers
    from moeprune.models.streaming import model as streaming
    from moeprune.models.streaming import passes

    model = checkpoint.memory.model
    layers = [model.get_submodule(name) for name in decoder_layers(model)]
    layer = width * max(sum(parameter.numel() for parameter in module.parameters()) for module in layers)
    return layer + max(streaming.FLOOR, layer // 2) + max(passes.FLOOR, layer // 8)


def _operations_per_second(device: str) -> float:
    """Measured on one square float32 product; a forward pass reaches about half of it."""
    import torch

    side = 1024
    a = torch.rand(side, side, device=device)
    a @ a
    started, rounds = time.perf_counter(), 8
    for _ in range(rounds):
        a @ a
    if device == "cuda":
        torch.cuda.synchronize()
    return 0.5 * 2 * side**3 * rounds / (time.perf_counter() - started)


def parse_bytes(text: str) -> int:
    """Bytes in a size such as 80GB, 24GiB or 512MB. Raises InputError for anything else."""
    units = {
        "KB": 10**3,
        "MB": 10**6,
        "GB": 10**9,
        "TB": 10**12,
        "KiB": 2**10,
        "MiB": 2**20,
        "GiB": 2**30,
        "TiB": 2**40,
    }
    number = text.rstrip("KMGTiB")
    unit = text[len(number) :]
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if unit not in units or not value > 0:
        raise InputError(f"--memory {text}: expected a size such as 80GB or 24GiB")
    return int(value * units[unit])


RATIOS = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75)
BITS = {"bf16": 16.0, "fp8": 8.0, "int4": 4.5}  # int4: groups of 32..128 carry a 16-bit scale


def fitting(inputs: Inputs, memory: int) -> list[dict[str, Any]]:
    """Every ratio and format of the result with its bytes, whether it fits, and the KV-cache tokens that are left.

    Experts in the format, everything else in bf16; engines need room for activations too, which is not counted.
    """
    experts = sum(t.entry.elements for t in inputs.checkpoint.tensors if t.role in ("expert", "fused"))
    others = sum(t.entry.elements for t in inputs.checkpoint.tensors if t.role not in ("expert", "fused"))
    per_token = kv_bytes_per_token(inputs.checkpoint.config)
    rows = []
    for ratio in RATIOS:
        for name, bits in BITS.items():
            size = int(experts * (1 - ratio) * bits / 8 + others * 2)
            left = (memory - size) // per_token if memory > size and per_token else 0
            rows.append({"prune": ratio, "format": name, "bytes": size, "fits": size <= memory, "kv_tokens": left})
            verdict = f"fits, {left:,} tokens of KV cache left" if size <= memory else "does not fit"
            say(f"memory: prune {ratio:5.3f} {name:5s} {size / 1e9:10.3f} GB  {verdict}")
    return rows


def kv_bytes_per_token(config: dict[str, Any] | Any) -> int:
    """Bytes of KV cache a token takes in bf16: full or latent attention; recurrent layers take none per token."""
    text = config.get("text_config", config)
    kinds = text.get("layer_types") or ["full_attention"] * text["num_hidden_layers"]
    layers = sum("linear" not in kind and kind not in ("mamba", "conv") for kind in kinds)
    if text.get("kv_lora_rank"):
        return 2 * layers * (text["kv_lora_rank"] + text.get("qk_rope_head_dim", 0))
    heads = text.get("num_key_value_heads") or text["num_attention_heads"]
    size = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    return 2 * 2 * layers * heads * size


if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

COUNTED, OTHER, SIGN = "bold cyan", "dim", "magenta"


def describe(token_set: TokenSet) -> "Table":
    """One row a domain: records used and skipped, tokens, what counts, tokens by role, longest bucket of lengths."""
    from rich.table import Table

    table = Table(title="Calibration data")
    for name in ("domain", "records", "skipped", "tokens", "counted", "pieces"):
        table.add_column(name, justify="left" if name == "domain" else "right")
    table.add_column("tokens by role")
    table.add_column("trajectory lengths")
    for name, told in token_set.manifest.items():
        skipped = ", ".join(f"{count} {reason}" for reason, count in told["records_skipped"].items())
        table.add_row(
            name,
            f"{told['records_used']:,} of {told['records_read']:,}",
            skipped or "0",
            f"{told['tokens']:,}",
            f"{told['counted']:,} ({told['count']})",
            f"{told['pieces']:,}",
            ", ".join(f"{role} {share:.0%}" for role, share in _shares(told["tokens_by_role"])),
            ", ".join(f"{bucket}: {count}" for bucket, count in told["length_histogram"].items()),
        )
    return table


def _shares(tokens: dict[str, int]) -> list[tuple[str, float]]:
    total = sum(tokens.values()) or 1
    return [(role, count / total) for role, count in sorted(tokens.items(), key=lambda item: (-item[1], item[0]))]


def example(token_set: TokenSet, tokenizer: Any, domain: str, *, tokens: int = 200) -> "Text":
    """The beginning of a trajectory of `domain`: what counts in colour and between ⟦ ⟧, the rest dim.

    The signs are there for terminals without colour; where everything counts there are none.
    """
    from rich.text import Text

    sequence = _telling(token_set, domain, tokens)
    ids, counted = sequence.ids[:tokens], sequence.counted[:tokens]
    some = not counted.all()
    text = Text()
    start = 0
    for position in range(1, len(ids) + 1):
        if position < len(ids) and counted[position] == counted[start]:
            continue
        run = tokenizer.decode(ids[start:position].tolist(), clean_up_tokenization_spaces=False)
        if counted[start] and some:
            text.append("⟦", SIGN).append(run, COUNTED).append("⟧", SIGN)
        else:
            text.append(run, COUNTED if counted[start] else OTHER)
        start = position
    if len(sequence.ids) > tokens:
        text.append(" …", SIGN)
    return text


def _telling(token_set: TokenSet, domain: str, tokens: int) -> TokenSequence:
    """The first sequence that shows both what counts and what does not within `tokens`, or else the first one."""
    own: Sequence[TokenSequence] = [sequence for sequence in token_set.sequences if sequence.domain == domain]
    assert own, f"no sequence of {domain}"
    return next((s for s in own if s.counted[:tokens].any() and not s.counted[:tokens].all()), own[0])
