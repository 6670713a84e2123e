"""A run directory made from invented tokens through the package's own artifacts: what a report has to read.

Statistics come from gated norms and outputs that are drawn here; plans from the real selection; metrics are invented.
"""

from pathlib import Path
from typing import Any

import numpy as np

from moeprune.artifacts.files import save_metrics, write_json, write_text
from moeprune.artifacts.plan import PrunePlan
from moeprune.artifacts.statistics import Layer, LayerStatistics, RoutingStatistics
from moeprune.selection.options import SelectionOptions
from moeprune.selection.select import select

CALIBRATED = {"agent": 1.0, "python": 0.8}
VERSIONS = {"python": "3.11.7", "moeprune": "0.1.0", "torch": "2.13.0+cpu", "transformers": "5.24.0"}
KL = {"agent": (0.021, 0.115), "python": (0.19, 0.27), "prose": (1.42, 1.55)}  # domain -> HOPE's and REAP's
NLL = {"agent": 0.262, "python": 2.708, "prose": 3.538}


def layer_sums(
    experts: int, top_k: int, tokens: int, *, dead: tuple[int, ...], seed: int, draw: int
) -> list[LayerStatistics]:
    """Sums of two halves of one layer; experts come in clusters of four that tend to fire together."""
    source = np.random.default_rng(seed)
    topics = source.normal(size=(experts // 4, 8))
    keys = np.repeat(topics, 4, axis=0) + 0.45 * source.normal(size=(experts, 8))
    loudness = np.exp(0.5 * source.normal(size=experts))
    directions = source.normal(size=(experts, 16))
    source = np.random.default_rng([seed, draw])
    halves = []
    for half in range(2):
        count = tokens // 2 if half == 0 else tokens - tokens // 2
        logits = (topics[source.integers(len(topics), size=count)] + source.normal(size=(count, 8))) @ keys.T / 2
        logits[:, list(dead)] = -1e9
        chosen = np.argsort(-logits, axis=1)[:, :top_k]
        weights = np.exp(np.take_along_axis(logits, chosen, 1))
        gates = np.zeros((count, experts))
        np.put_along_axis(gates, chosen, weights / weights.sum(axis=1, keepdims=True), 1)
        norms = loudness * np.exp(0.3 * source.normal(size=(count, experts)))
        on = (gates > 0).astype(np.int64)
        gated = gates * norms
        unit = directions / np.linalg.norm(directions, axis=1, keepdims=True)
        halves.append(
            LayerStatistics(
                tokens=np.array(count),
                co_count=on.T @ on,
                norm_product=gated.T @ gated,
                output_product=(gated.T @ gated) * (unit @ unit.T),
                gate_sum=gates.sum(0),
                norm_sum=(norms * on).sum(0),
                norm_square_sum=(norms**2 * on).sum(0),
                gated_norm_sum=gated.sum(0),
                output_max=np.where(on.any(0), loudness, -np.inf),
            )
        )
    return halves


def statistics(
    *, layers: int = 4, experts: int = 32, top_k: int = 4, tokens: int = 6000, draw: int = 0
) -> RoutingStatistics:
    """Two domains, one dead expert in the second layer; other draws are other recordings of the same model."""
    infos = tuple(Layer(f"model.layers.{i}.mlp", experts, top_k, routing="softmax, top-k") for i in range(layers))
    whole: dict[str, dict[str, LayerStatistics]] = {}
    half: dict[str, dict[str, LayerStatistics]] = {}
    for number, (domain, share) in enumerate(CALIBRATED.items()):
        whole[domain], half[domain] = {}, {}
        for index, info in enumerate(infos):
            dead = (5,) if index == 1 else ()
            seed = 100 * index + number
            even, odd = layer_sums(experts, top_k, int(share * tokens), dead=dead, seed=seed, draw=draw)
            whole[domain][info.name], half[domain][info.name] = even + odd, even
    manifest: dict[str, Any] = {
        "key": f"a81d5502c9e{draw:x}",
        "model": {"path": "reference", "model_type": "qwen3_moe", "fingerprint": "qwen3_moe-1f2e3d4c5b6a"},
        "domains": {
            "agent": {
                "path": "reference:agent",
                "records_read": 412,
                "records_used": 400,
                "records_skipped": {"too long": 9, "no assistant turn": 3},
                "tokens": tokens + 240,
                "counted": tokens,
                "tokens_by_role": {"system": 1210, "user": 1507, "assistant": 2400, "tool": 1123},
                "pieces": 431,
                "skipped_examples": ["reference:agent:17: 812 tokens > sequence_length=512"],
                "overflow": {"policy": "skip", "share_tokens_lost": 0.031},
            },
            "python": {
                "path": "reference:python",
                "records_read": 120,
                "records_used": 120,
                "records_skipped": {},
                "tokens": int(0.8 * tokens),
                "counted": int(0.8 * tokens),
                "tokens_by_role": {"text": int(0.8 * tokens)},
                "pieces": 160,
            },
        },
    }
    return RoutingStatistics(manifest, infos, whole, half)


CONFIG = """\
model: {path: reference, revision: null, dtype: auto}
calibration:
  domains:
    - {name: agent, path: 'reference:agent', tokens: 65536, count: all}
    - {name: python, path: 'reference:python', tokens: 65536, count: all}
  sequence_length: 512
selection:
  mix: {}
  criterion: {name: hope, product: norms, normalise: all_tokens, pairwise: true}
  budget: {prune: 0.5, multiple_of: 1, must_keep: {}}
  solver: {name: swap, starts: 16, seed: 0, certificate: true}
checkpoint: {save: true, mtp: refuse}
evaluation:
  domains:
    - {name: agent, path: 'reference:agent'}
    - {name: python, path: 'reference:python'}
    - {name: prose, path: 'reference:prose'}
  tasks: [agent]
  loops: true
  baselines: [{name: reap}, {name: frequency}, {name: random}]
tracking: {wandb: offline, project: moeprune}
"""


def with_interval(name: str, value: float, spread: float) -> dict[str, float]:
    return {name: value, f"{name}/ci_low": value * (1 - spread), f"{name}/ci_high": value * (1 + spread)}


def method_metrics(factor: float, reap: float, accuracy: float, loops: float) -> dict[str, float]:
    """Metrics of one method between HOPE (reap=0) and REAP (reap=1), its KL scaled."""
    metrics: dict[str, float] = {}
    kls = {domain: factor * (a + reap * (b - a)) for domain, (a, b) in KL.items()}
    for domain, kl in kls.items():
        metrics |= with_interval(f"fidelity/kl/{domain}", kl, 0.07)
        metrics |= with_interval(f"fidelity/nll/{domain}", NLL[domain] + 1.1 * kl, 0.02)
        metrics |= {f"fidelity/nll/{domain}/base": NLL[domain]}
        metrics |= with_interval(f"fidelity/top1/{domain}", float(np.exp(-kl / 2)), 0.01)
    metrics |= {"fidelity/kl/mean": float(np.mean(list(kls.values()))), "fidelity/kl/worst": max(kls.values())}
    metrics |= with_interval("task/accuracy/agent", accuracy, 0.1) | {"task/accuracy/agent/base": 1.0}
    return metrics | with_interval("generation/loop_rate", loops, 0.4) | {"generation/loop_rate/base": 0.02}


def all_metrics() -> dict[str, float]:
    metrics = method_metrics(1.0, 0.0, 0.85, 0.04)
    others = {"reap": (1.0, 1.0, 0.8, 0.05), "frequency": (1.9, 0.7, 0.05, 0.31), "random": (3.1, 0.5, 0.0, 0.62)}
    for label, arguments in others.items():
        metrics |= {f"baseline/{label}/{name}": value for name, value in method_metrics(*arguments).items()}
    size = {"size/parameters": 2.311552e6, "size/parameters/base": 3.884416e6, "size/bytes": 4.63e6}
    return metrics | size | {"size/bytes/base": 7.78e6}


def make_run(root: Path, *, name: str = "hope-p50", layers: int = 4, experts: int = 32, top_k: int = 4) -> Path:
    """A finished run directory under root, its recording beside it; remove files to get an unfinished one."""
    directory = root / name
    recording = root / "shared" / "record-a81d5502c9ee" / "statistics.safetensors"
    seen = statistics(layers=layers, experts=experts, top_k=top_k)
    seen.save(recording)
    write_text(directory / "config.yaml", CONFIG)
    plans = {}
    for label in ("hope", "reap", "frequency", "random"):
        solver = {"name": "swap", "certificate": label == "hope" and experts <= 32}
        criterion = {"name": label} | ({"product": "norms", "normalise": "all_tokens"} if label == "hope" else {})
        options = SelectionOptions.model_validate({"criterion": criterion, "budget": {"prune": 0.5}, "solver": solver})
        plans[label] = select(seen, options)
        plans[label].save(directory / ("" if label == "hope" else f"baselines/{label}") / "plan.json")
    _mark(directory, plans["hope"])
    save_metrics(directory / "metrics.json", all_metrics())
    stages = {
        "record": {
            "key": "a81d5502c9ee",
            "seconds": 41.2,
            "statistics": "../shared/record-a81d5502c9ee/statistics.safetensors",
            "reused": False,
            "tokens_per_second": 1587.0,
        },
        "select": {
            "key": "0b9a8c7d6e5f",
            "seconds": 3.9,
            "plan": "plan.json",
            "baselines": ["reap", "frequency", "random"],
        },
        "prune": {
            "key": "1c2d3e4f5a6b",
            "seconds": 0.4,
            "checkpoint": "checkpoint",
            "parameters": 2311552,
            "parameters_base": 3884416,
            "bytes": 4630000,
            "bytes_base": 7780000,
        },
        "evaluate": {"key": "77aa88bb99cc", "seconds": 58.0, "metrics": "metrics.json"},
    }
    record = {
        "format": "moeprune.run/1",
        "name": name,
        "created": "2026-11-30T10:12:13+0000",
        "versions": VERSIONS,
        "commit": "6c9e8f4a1b2c3d4e5f60718293a4b5c6d7e8f901",
        "stages": stages,
        "warnings": [*plans["hope"].warnings, "evaluation domain prose: the interval rests on 12 trajectories"],
    }
    write_json(directory / "run.json", record)
    return directory


def _mark(directory: Path, plan: PrunePlan) -> None:
    """Give the last layer what the real selection of this small case does not show: a time limit, an unstable set."""
    shaky = {"jaccard": 0.41, "regret_even": 0.08, "regret_odd": 0.12}
    last = plan.layers[-1].model_copy(update={"status": "time_limit", "stability": shaky})
    plan.model_copy(update={"layers": (*plan.layers[:-1], last)}).save(directory / "plan.json")
