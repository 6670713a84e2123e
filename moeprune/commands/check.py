"""`moeprune check`: everything that can be known before weights are loaded: budget, data, memory and time."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeprune.artifacts.errors import InputError
from moeprune.commands.arguments import Json, Overrides, finish, start
from moeprune.commands.preview import describe, example
from moeprune.console import say, warn

if TYPE_CHECKING:
    from moeprune.checkpoint.inventory import Inventory
    from moeprune.models.options import ModelOptions
    from moeprune.run.run_data import Inputs

UNITS = tuple(f"{prefix}{unit}" for prefix in "KMGT" for unit in ("B", "iB"))
RATIOS = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75)
BITS = {"bf16": 16.0, "fp8": 8.0, "int4": 4.5}  # int4: groups of 32..128 carry a 16-bit scale
EXPERT_ROLES = ("expert", "fused")  # of tensors in a checkpoint's inventory


def check(
    config: Path,
    overrides: Overrides = None,
    memory: Annotated[str | None, typer.Option(help="Which ratios and formats fit, e.g. 80GB.")] = None,
    as_json: Json = False,
) -> None:
    """Validate a config: data counts, families, budget and an estimate of the pass; loads no weights."""
    start(as_json)
    finish(check_file(config, overrides or [], memory=memory), None, as_json=as_json)


def check_file(path: Path, overrides: Sequence[str], *, memory: str | None = None) -> dict[str, Any]:
    """What a run of this config would do: model, budget by layer, data by domain, memory and time of the pass.

    Raises InputError for everything that would stop the run.
    """
    from moeprune.artifacts.run import STAGES
    from moeprune.config.grid_file import is_grid
    from moeprune.config.load import load_run
    from moeprune.run.requirements import require_config, require_stages
    from moeprune.run.run_data import Inputs
    from moeprune.selection.budget import layer_budgets
    from moeprune.selection.protection import named_experts

    limit = None if memory is None else parse_bytes(memory)
    if is_grid(path):
        return _check_grid(path, overrides, limit)
    config = load_run(path, overrides)
    inputs = Inputs(config)
    require_config(inputs)
    require_stages(inputs, STAGES)
    model_type = inputs.model.checkpoint.config["model_type"]
    say(f"model: {config.model.path} ({model_type}), fingerprint {inputs.model.fingerprint}")
    must_keep = named_experts(inputs.model.layers, config.selection.budget)
    budgets = layer_budgets(inputs.model.layers, config.selection.budget, must_keep)
    spread = config.selection.budget.scope == "global"
    for budget in [] if spread else budgets:
        say(f"budget: {budget}")
    if spread:
        total = sum(budget.layer.num_experts for budget in budgets)
        say(f"budget: {sum(b.pruned for b in budgets):,} of {total:,} experts go, spread over the layers by cost")
    serving = [] if spread else _engine_notes(inputs, [budget.kept for budget in budgets])
    data = {part: _describe_data(inputs, part) for part in ("calibration", "evaluation")}
    estimate = estimate_pass(inputs)
    _say_estimate(estimate, inputs.model.loading_bytes)
    summary: dict[str, Any] = {
        "config": config.model_dump(mode="json"),
        "model": {"model_type": model_type, "fingerprint": inputs.model.fingerprint},
        "budget": [
            {"layer": b.layer.name, "num_experts": b.layer.num_experts, "kept": None if spread else b.kept}
            for b in budgets
        ],
        "serving": serving,
        "data": data,
        "estimate": estimate,
    }
    if limit is not None:
        summary["fits"] = fitting(inputs, limit)
    return summary


def _say_estimate(estimate: Mapping[str, float], loading_bytes: int) -> None:
    say(
        f"estimate: {estimate['weight_bytes'] / 1e9:.2f} GB of weights in memory "
        f"({loading_bytes / 1e9:.2f} GB at most while they load), "
        f"{estimate['statistics_bytes'] / 1e6:,.1f} MB of statistics; recording {estimate['tokens']:,} tokens takes "
        f"about {estimate['seconds']:,.0f} s on this machine"
    )
    say(
        f"estimate: read layer by layer (runtime.streaming), {estimate['streamed_bytes'] / 1e9:.2f} GB of memory and "
        f"{estimate['read_bytes'] / 1e9:.2f} GB from disk"
    )


def _engine_notes(inputs: "Inputs", kept: Sequence[int]) -> list[str]:
    """What serving engines do with these counts; the writer judges layers of multi-token prediction."""
    from moeprune.models.engine_limits import MTP_KEYS, notes

    config = {**inputs.model.checkpoint.config, **dict.fromkeys(MTP_KEYS, 0)}
    texts = [str(note) for note in notes(config, kept, top_k=max(layer.top_k for layer in inputs.model.layers))]
    for text in texts:
        warn(text)
    return texts


def _check_grid(path: Path, overrides: Sequence[str], memory: int | None) -> dict[str, Any]:
    """The names of a grid's runs, each with a model and a budget that work; what of each model fits."""
    from moeprune.artifacts.run import STAGES
    from moeprune.config.grid_file import load_grid
    from moeprune.run.requirements import require_config, require_stages
    from moeprune.run.run_data import shared_inputs

    runs = load_grid(path, overrides)
    loaded: dict[str, Inputs] = {}
    models: dict[ModelOptions, Inputs] = {}  # one of each model
    for config in runs.values():
        inputs = shared_inputs(config, loaded)
        models.setdefault(config.model, inputs)
        require_config(inputs)
        require_stages(inputs, STAGES)
    for name in runs:
        say(f"run: {name}")
    if memory is None:
        return {"runs": list(runs)}
    names = {"@".join(filter(None, (options.path, options.revision))): options for options in models}
    return {"runs": list(runs), "fits": {name: fitting(models[options], memory) for name, options in names.items()}}


def _describe_data(inputs: "Inputs", part: str) -> dict[str, Any]:
    from rich.console import Console

    tokens = inputs.data.calibration if part == "calibration" else inputs.data.evaluation
    for warning in tokens.warnings:
        warn(warning)
    console = Console(stderr=True)
    console.print(describe(tokens, title=f"{part} data"))
    if part == "calibration":
        for domain in tokens.manifest:
            say(f"{domain}: what counts of one trajectory")
            console.print(example(tokens, inputs.model.tokenizer, domain))
    return {name: dict(manifest) for name, manifest in tokens.manifest.items()}


def estimate_pass(inputs: "Inputs") -> dict[str, Any]:
    """Bytes of weights and statistics, and the seconds a recording would take at this machine's matrix speed.

    streamed_bytes: memory of a pass that reads the weights (read_bytes, once) layer by layer.
    """
    from moeprune.models.loading import number_bytes

    checkpoint = inputs.model.checkpoint
    experts, others = _elements(checkpoint)
    width = number_bytes(inputs.config.model.dtype, inputs.model.device_type)
    layers = checkpoint.layers
    used = sum(layer.top_k / layer.num_experts for layer in layers) / len(layers)
    tokens = inputs.data.calibration.tokens
    operations = 2 * tokens * (experts * used + others)
    domains = len(inputs.config.calibration.domains)
    cells = sum(3 * layer.num_experts**2 + 6 * layer.num_experts for layer in layers)
    return {
        "weight_bytes": width * (experts + others),
        "streamed_bytes": streamed_bytes(checkpoint, width),
        "read_bytes": checkpoint.tensor_bytes,
        "statistics_bytes": 2 * 8 * domains * cells,
        "tokens": tokens,
        "seconds": operations / _operations_per_second(inputs.model.device_type),
    }


def _elements(checkpoint: "Inventory") -> tuple[int, int]:
    """Numbers in expert weights, and in all others."""
    experts = sum(tensor.entry.elements for tensor in checkpoint.tensors if tensor.role in EXPERT_ROLES)
    return experts, sum(tensor.entry.elements for tensor in checkpoint.tensors) - experts


def streamed_bytes(checkpoint: "Inventory", width: int) -> int:
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
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        size = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        size = 0
    if not text.endswith(UNITS) or size <= 0:
        raise InputError(f"--memory {text}: expected a size such as 80GB or 24GiB")
    return size


def fitting(inputs: "Inputs", memory: int) -> list[dict[str, Any]]:
    """Every ratio and format of the result with its bytes, whether it fits, and the KV-cache tokens that are left.

    Experts in the format, everything else in bf16; engines need room for activations too, which is not counted.
    """
    experts, others = _elements(inputs.model.checkpoint)
    per_token = kv_bytes_per_token(inputs.model.checkpoint.config)
    rows = []
    for ratio in RATIOS:
        for name, bits in BITS.items():
            size = int(experts * (1 - ratio) * bits / 8 + others * 2)
            left = (memory - size) // per_token if memory > size and per_token else 0
            rows.append({"prune": ratio, "format": name, "bytes": size, "fits": size <= memory, "kv_tokens": left})
            verdict = f"fits, {left:,} tokens of KV cache left" if size <= memory else "does not fit"
            say(f"memory: prune {ratio:5.3f} {name:5s} {size / 1e9:10.3f} GB  {verdict}")
    return rows


def kv_bytes_per_token(config: Mapping[str, Any]) -> int:
    """Bytes of KV cache a token takes in bf16: full or latent attention; recurrent layers take none per token."""
    text = config.get("text_config", config)
    kinds = text.get("layer_types") or ["full_attention"] * text["num_hidden_layers"]
    layers = sum("linear" not in kind and kind not in ("mamba", "conv") for kind in kinds)
    if text.get("kv_lora_rank"):
        return 2 * layers * (text["kv_lora_rank"] + text.get("qk_rope_head_dim", 0))
    heads = text.get("num_key_value_heads") or text["num_attention_heads"]
    size = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    return 2 * 2 * layers * heads * size
