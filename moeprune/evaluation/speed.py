"""How fast a pruned model is beside its unpruned self, and what it needs: alternating runs, medians and their spread.

The experts that a token meets stay `top_k`, so pruning alone saves memory rather than arithmetic; what it gains in
time comes from reading fewer weights. Both models share one process and one set of tensors, so what is measured is the
model, not a serving engine.
"""

import inspect
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moeprune.artifacts.errors import InputError
from moeprune.data.trajectories import TokenSet
from moeprune.evaluation.students import Student

CACHE = 2**30  # bytes for keys and values beside the unpruned model


def speed(
    teacher: Any,
    students: Mapping[str, Student],
    token_set: TokenSet,
    *,
    batch: int = 4,
    prompt_tokens: int = 512,
    new_tokens: int = 32,
    repeats: int = 5,
) -> dict[str, dict[str, float]]:
    """Label -> `speed/<measure>` of each student, with `/base` for the teacher.

    prefill_tokens_per_second, decode_tokens_per_second, time_to_first_token (seconds, batch 1), weight_bytes,
    peak_memory (bytes: the weights and the most that a prefill and a decoding step hold beside them) and kv_capacity
    (tokens of cache, in the model's dtype, that fit where the unpruned model has 1 GiB for them).
    Each timed figure is the median of `repeats` runs; `/low` and `/high` are the smallest and the largest. The runs
    alternate between the models, in reverse order every second time, so that a machine that drifts is unfair to none.
    The prompt is held-out text, because routing decides which weights are read.
    """
    subjects = [(one.model, one.inside()) for one in (Student(teacher), *students.values())]
    prompts = prompts_of(teacher.config, token_set, batch=batch, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
    runs: list[list[dict[str, float]]] = [[] for _ in subjects]
    for repeat in range(-1, repeats):  # the first round warms up
        for index in list(range(len(subjects)))[:: 1 if repeat % 2 else -1]:
            model, inside = subjects[index]
            with inside:
                figures = _timed(model, prompts.to(model.device), new_tokens)
            if repeat >= 0:
                runs[index].append(figures)
    sizes: list[dict[str, float]] = []
    for model, inside in subjects:
        with inside:
            weights = weight_bytes(model)
            peak = weights + peak_beside_weights(model, prompts.to(model.device))
            room = CACHE + (sizes[0]["weight_bytes"] if sizes else weights) - weights
            capacity = room // cache_bytes_per_token(model, prompts.to(model.device))
            sizes.append({"weight_bytes": weights, "peak_memory": peak, "kv_capacity": capacity})
    of_base = _metrics(runs[0], sizes[0], "/base")
    return {label: _metrics(runs[i], sizes[i], "") | of_base for i, label in enumerate(students, start=1)}


def weight_bytes(model: Any) -> int:
    """Bytes of all parameters and buffers; tied weights are one parameter and count once."""
    return sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])


@torch.no_grad()
def cache_bytes_per_token(model: Any, prompts: torch.Tensor) -> float:
    """Bytes of the attention layers' keys and values, of one token, as a prefill leaves them; at least 1."""
    output = _forward(model, prompts)
    cache = output["cache"] if "cache" in output else output["past_key_values"]
    held = [getattr(layer, name, None) for layer in getattr(cache, "layers", []) for name in ("keys", "values")]
    return max(1.0, sum(tensor.nbytes for tensor in held if isinstance(tensor, torch.Tensor)) / prompts.numel())


def _metrics(runs: list[dict[str, float]], sizes: Mapping[str, float], suffix: str) -> dict[str, float]:
    metrics = {f"speed/{name}{suffix}": float(value) for name, value in sizes.items()}
    for measure in runs[0]:
        values, name = [run[measure] for run in runs], f"speed/{measure}{suffix}"
        metrics |= {name: statistics.median(values), f"{name}/low": min(values), f"{name}/high": max(values)}
    return metrics


def prompts_of(
    config: Any, token_set: TokenSet, *, batch: int = 4, prompt_tokens: int = 512, new_tokens: int = 32
) -> torch.Tensor:
    """(batch, prompt tokens) of held-out text, repeated where there is too little of it."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and longest < prompt_tokens + new_tokens:
        prompt_tokens = longest - new_tokens
    if prompt_tokens < 1 or not token_set.sequences:
        raise InputError(f"evaluation.speed: no room for a prompt and {new_tokens} new tokens in {longest} positions")
    ids = np.concatenate([sequence.ids for sequence in token_set.sequences]).astype(np.int64)
    return torch.from_numpy(np.resize(ids, (batch, prompt_tokens)))


@torch.no_grad()
def _timed(model: Any, prompts: torch.Tensor, new_tokens: int) -> dict[str, float]:
    """One run of every timed measure."""
    start = _clock(model)
    _forward(model, prompts[:1])
    first = _clock(model)
    output = _forward(model, prompts)
    filled = _clock(model)
    for _ in range(new_tokens):
        output = _step(model, output)
    done = _clock(model)
    return {
        "prefill_tokens_per_second": prompts.numel() / (filled - first),
        "decode_tokens_per_second": len(prompts) * new_tokens / (done - filled),
        "time_to_first_token": first - start,
    }


def _forward(model: Any, input_ids: torch.Tensor, **options: Any) -> Any:
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = 1  # what a serving engine computes; a few families have no such option
    return model(input_ids=input_ids, use_cache=True, **options)


def _step(model: Any, output: Any) -> Any:
    """One more token for every row."""
    # transformers renamed past_key_values within version 5.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return _forward(model, output.logits[:, -1:].argmax(dim=-1), **{name: output[name]})


def _clock(model: Any) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()


@torch.no_grad()
def peak_beside_weights(model: Any, prompts: torch.Tensor) -> int:
    """The most bytes that a prefill and one decoding step hold at once beside the weights."""
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(model.device)
        before = torch.cuda.memory_allocated(model.device)
        _step(model, _forward(model, prompts))
        return torch.cuda.max_memory_allocated(model.device) - before
    # The CPU's allocator keeps no such figure; the profiler sees every allocation, so this one is exact.
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _step(model, _forward(model, prompts))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [event for event in events if event.get("name") == "[memory]"]
    held = np.cumsum([event["args"]["Bytes"] for event in sorted(changes, key=lambda event: float(event["ts"]))])
    return int(held.max())
