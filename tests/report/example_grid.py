"""A grid directory made by hand: methods x ratios x draws, with one failed, one unfinished, one missing run.

Plans come from the real selection; the invented KL of a run grows with HOPE's cost of its set, so that figures which
ask whether cost predicts damage have something to show.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from moeprune.artifacts.files import save_metrics, write_json, write_text
from moeprune.artifacts.plan import PrunePlan
from moeprune.artifacts.statistics import RoutingStatistics
from moeprune.selection.criteria.criterion import gather
from moeprune.selection.options import SelectionOptions
from moeprune.selection.select import select
from tests.report.example_run import NLL, VERSIONS, statistics, with_interval

CRITERIA: dict[str, dict[str, object]] = {
    "hope": {"name": "hope", "product": "norms", "normalise": "all_tokens", "pairwise": True},
    "paper": {"name": "hope", "product": "norms", "normalise": "co_selected", "pairwise": True},
    "reap": {"name": "reap"},
    "frequency": {"name": "frequency"},
    "random": {"name": "random", "seed": 0},
}
HARM = {"agent": 0.06, "python": 0.5, "prose": 2.8}
BASE_BYTES, BASE_PARAMETERS = 7.77e6, 3884416


def config_text(criterion: Mapping[str, object], ratio: float, draw: int) -> str:
    options = ", ".join(f"{key}: {str(value).lower()}" for key, value in criterion.items())
    return f"""\
model: {{path: reference, dtype: auto}}
calibration:
  domains:
    - {{name: agent, path: 'reference:agent', tokens: 65536}}
    - {{name: python, path: 'reference:python', tokens: 65536}}
  seed: {draw}
selection:
  criterion: {{{options}}}
  budget: {{prune: {ratio}}}
  solver: {{name: swap, starts: 4, seed: 0}}
evaluation:
  domains: [{", ".join(f"{{name: {d}, path: 'reference:{d}'}}" for d in HARM)}]
tracking: {{wandb: offline}}
"""


def hope_share(seen: RoutingStatistics, plan: PrunePlan) -> float:
    """HOPE's cost of the plan's sets over the cost of pruning everything, straight from the sums, mean over layers."""
    shares = []
    for evidence in gather(seen, {}):
        pruned = np.ones(evidence.layer.num_experts)
        pruned[list(plan.kept[evidence.layer.name])] = 0
        products = evidence.statistics.norm_product
        shares.append(float(pruned @ products @ pruned / products.sum()))
    return float(np.mean(shares))


def metrics_of(share: float, ratio: float, source: np.random.Generator) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for domain, harm in HARM.items():
        kl = harm * share**0.7 * float(np.exp(0.12 * source.normal()))
        metrics |= with_interval(f"fidelity/kl/{domain}", kl, 0.08)
        metrics |= {f"fidelity/nll/{domain}": NLL[domain] + kl, f"fidelity/nll/{domain}/base": NLL[domain]}
    kls = [metrics[f"fidelity/kl/{domain}"] for domain in HARM]
    metrics |= {"fidelity/kl/mean": float(np.mean(kls)), "fidelity/kl/worst": max(kls)}
    accuracy = float(np.clip(1.02 - 2.2 * share, 0, 1))
    metrics |= with_interval("task/accuracy/agent", accuracy, 0.1) | {"task/accuracy/agent/base": 1.0}
    metrics |= with_interval("generation/loop_rate", float(min(0.9, 0.02 + share)), 0.3)
    kept = 1 - 0.81 * ratio
    metrics |= {"size/bytes": BASE_BYTES * kept, "size/bytes/base": BASE_BYTES}
    return metrics | {"size/parameters": BASE_PARAMETERS * kept, "size/parameters/base": BASE_PARAMETERS}


def make_grid(
    root: Path, *, ratios: tuple[float, ...] = (0.125, 0.25, 0.5), draws: int = 2, layers: int = 3, broken: bool = True
) -> Path:
    """A grid directory under root; with `broken`, three of its runs are not done."""
    directory = root / "criteria"
    source = np.random.default_rng(0)
    names = []
    for draw in range(draws):
        seen = statistics(layers=layers, experts=16, tokens=1500, draw=draw)
        seen.save(root / "shared" / f"record-{draw}" / "statistics.safetensors")
        for label, criterion in CRITERIA.items():
            for ratio in ratios:
                name = f"{label}-p{round(100 * ratio)}-s{draw}"
                names.append(name)
                budget, solver = {"prune": ratio}, {"name": "swap", "starts": 4}
                options = {"criterion": criterion, "budget": budget, "solver": solver}
                plan = select(seen, SelectionOptions.model_validate(options))
                plan.save(directory / name / "plan.json")
                write_text(directory / name / "config.yaml", config_text(criterion, ratio, draw))
                save_metrics(directory / name / "metrics.json", metrics_of(hope_share(seen, plan), ratio, source))
                write_json(directory / name / "run.json", run_json(name, draw))
    write_json(directory / "grid.json", {"runs": names})
    if broken:
        break_three(directory, names)
    return directory


def run_json(name: str, draw: int) -> dict[str, object]:
    stages = {
        "record": {
            "key": f"r{draw}",
            "seconds": 3.0,
            "statistics": f"../../shared/record-{draw}/statistics.safetensors",
        },
        "select": {"key": "s", "seconds": 0.2, "plan": "plan.json"},
        "evaluate": {"key": "e", "seconds": 9.0, "metrics": "metrics.json"},
    }
    return {"format": "moeprune.run/1", "name": name, "versions": VERSIONS, "stages": stages, "warnings": []}


def break_three(directory: Path, names: list[str]) -> None:
    """The last draw's frequency runs: one failed, one stopped after select, one never started."""
    failed, stopped, missing = (
        name for name in names if name.startswith("frequency") and name.endswith(names[-1][-3:])
    )
    for path in (directory / missing).iterdir():
        path.unlink()
    (directory / missing).rmdir()
    for name in (failed, stopped):
        (directory / name / "metrics.json").unlink()
    record = run_json(stopped, 1)
    record["stages"] = {k: v for k, v in record["stages"].items() if k != "evaluate"}  # type: ignore[attr-defined]
    write_json(directory / stopped / "run.json", record)
    write_json(directory / "grid.json", {"runs": names, "failed": {failed: "RuntimeError: out of memory in layer 3"}})
