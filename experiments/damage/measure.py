"""Prune sets that no criterion chose, what every criterion says they cost, and what they do to the model.

    python experiments/damage/measure.py            # about ten minutes on one core

Writes results.csv: one row a set, its KL, and its cost under every criterion; conclude.py makes the table and figure.
"""

import argparse
import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import moeprune as mp
from moeprune.reference import DOMAINS
from moeprune.selection.criteria.criterion import LayerEvidence, gather

CRITERIA: dict[str, dict[str, Any]] = {
    "frequency": {"name": "frequency"},
    "ean": {"name": "ean"},
    "man": {"name": "man"},
    "msan": {"name": "msan"},
    "reap": {"name": "reap"},
    "reap_l2": {"name": "reap_l2"},
    "ean_ca": {"name": "ean_ca"},
    "mone": {"name": "mone"},
    "hope norms all": {"name": "hope", "product": "norms", "normalise": "all_tokens"},
    "hope norms co": {"name": "hope", "product": "norms", "normalise": "co_selected"},
    "hope outputs all": {"name": "hope", "product": "outputs", "normalise": "all_tokens"},
}
# setting -> (domains calibrated on, share pruned, the KL that counts)
SETTINGS = {"all 12.5 %": (DOMAINS, 0.125, "mean"), "agent 50 %": (("agent",), 0.5, "agent")}
TOKENS, HELD_OUT, SETS, SEED = 28_800, 1_536, 60, 7
STARTS = ("reap", "reap_l2", "hope norms all", "hope norms co")  # whose choices `near` starts from


def costs_of(evidence: list[LayerEvidence]) -> dict[str, Callable[[dict[str, np.ndarray]], float]]:
    """Criterion -> the cost of a whole plan: every layer's cost over the cost of losing that layer's experts all."""
    costs = {}
    for label, options in CRITERIA.items():
        criterion = mp.SelectionOptions.parse({"criterion": options}).criterion
        parts = {item.layer.name: (criterion.objective(item), criterion.layer_scale(item)) for item in evidence}
        costs[label] = lambda sets, parts=parts: sum(parts[n][0].cost(s) / parts[n][1] for n, s in sets.items())
    return costs


def random_sets(evidence: list[LayerEvidence], share: float, draw: np.random.Generator) -> dict[str, np.ndarray]:
    """Layer -> pruned experts (experts,), any set being as likely as any other."""
    sets = {}
    for item in evidence:
        pruned = np.zeros(item.layer.num_experts, dtype=bool)
        pruned[draw.choice(len(pruned), int(share * len(pruned)), replace=False)] = True
        sets[item.layer.name] = pruned
    return sets


def exchanged(chosen: dict[str, np.ndarray], draw: np.random.Generator) -> dict[str, np.ndarray]:
    """One or two pruned experts of each layer come back, as many others go."""
    sets = {}
    for name, pruned in chosen.items():
        pruned, count = pruned.copy(), int(draw.integers(1, 3))
        back = draw.choice(np.flatnonzero(pruned), count, replace=False)
        go = draw.choice(np.flatnonzero(~pruned), count, replace=False)
        pruned[back], pruned[go] = False, True
        sets[name] = pruned
    return sets


def plan_of(sets: dict[str, np.ndarray], like: mp.PrunePlan) -> mp.PrunePlan:
    layers = []
    for layer in like.layers:
        pruned = sets.get(layer.name, np.zeros(layer.num_experts, dtype=bool))
        kept = tuple(np.flatnonzero(~pruned).tolist())
        layers.append(mp.LayerPlan(name=layer.name, num_experts=layer.num_experts, top_k=layer.top_k, kept=kept))
    return like.model_copy(update={"layers": tuple(layers)})


def populations(
    evidence: list[LayerEvidence], chosen: list[dict[str, np.ndarray]], share: float, count: int
) -> dict[str, list[dict[str, np.ndarray]]]:
    """random: any sets; near: good choices with a few exchanges; one layer: random in one layer, the others whole."""
    draw = np.random.default_rng(SEED)
    names = [item.layer.name for item in evidence]
    return {
        "random": [random_sets(evidence, share, draw) for _ in range(count)],
        "near": [exchanged(chosen[i % len(chosen)], draw) for i in range(count)],
        "one layer": [
            {name: sets for name, sets in random_sets(evidence, share, draw).items() if name == names[i % len(names)]}
            for i in range(count)
        ],
    }


def measure(setting: str, *, small: bool) -> list[dict[str, Any]]:
    """Rows of results.csv."""
    names, share, measured = SETTINGS[setting]
    loaded = mp.load_model(mp.ModelOptions(path="reference", dtype="float32"))
    tokens = 1_200 if small else TOKENS
    domains = [mp.Domain(name=n, path=f"reference:{n}", tokens=tokens // len(names)) for n in names]
    calibration = mp.load_tokens(domains, loaded.tokenizer, part="calibration")
    statistics = mp.record(loaded.model, calibration, statistics="all")
    evidence = gather(statistics, {})
    plans = [
        mp.select(statistics, mp.SelectionOptions.parse({"criterion": CRITERIA[c], "budget": {"prune": share}}))
        for c in STARTS
    ]
    chosen = [{y.name: np.isin(np.arange(y.num_experts), y.pruned) for y in plan.layers} for plan in plans]
    domains = [mp.Domain(name=n, path=f"reference:{n}", tokens=128 if small else HELD_OUT) for n in names]
    heldout = mp.load_tokens(domains, loaded.tokenizer, part="heldout")
    costs, rows = costs_of(evidence), []
    for population, sets in populations(evidence, chosen, share, 4 if small else SETS).items():
        students = {str(number): plan_of(item, plans[0]) for number, item in enumerate(sets)}
        metrics = mp.evaluate(loaded.model, students, heldout)
        for number, item in enumerate(sets):
            where = next(iter(item)) if len(item) == 1 else "all"
            row = {"setting": setting, "population": population, "set": number, "layer": where}
            row["kl"] = metrics[str(number)][f"fidelity/kl/{measured}"]
            rows.append(row | {label: cost(item) for label, cost in costs.items()})
        print(f"{setting}, {population}: {len(sets)} sets", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent)
    parser.add_argument("--small", action="store_true", help="a smoke run: few tokens, numbers without meaning")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for setting in SETTINGS for row in measure(setting, small=arguments.small)]
    with (arguments.output / "results.csv").open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})


if __name__ == "__main__":
    main()
