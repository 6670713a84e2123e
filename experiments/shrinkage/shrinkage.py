"""What drawing rare pairs of F towards the product of means does to sets from few tokens; writes results.csv.

python experiments/shrinkage/shrinkage.py [--draws 5] [--tokens 340 2048] [--reference-tokens 24576] [--output DIR]
"""

import argparse
import csv
import os
from itertools import combinations
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from moeprune.artifacts.statistics import LayerStatistics
from moeprune.data.options import Domain, Intake
from moeprune.data.trajectories import load_tokens
from moeprune.models.loading import (
    LoadedModel,
    load_model,
)
from moeprune.models.options import ModelOptions
from moeprune.recording.recorder import record
from moeprune.reference import DOMAINS
from moeprune.selection.criteria.hope import interaction
from moeprune.selection.objective import Quadratic, problem
from moeprune.selection.solvers.table import Swap

HERE = Path(__file__).parent
SHRINKAGE = (0.0, 1.0, 3.0, 10.0, 30.0, 100.0)
FRACTIONS = (0.125, 0.25, 0.5)


def recorded(loaded: LoadedModel, tokens: int, seed: int) -> dict[str, LayerStatistics]:
    """Layer name -> sums over so many tokens of every domain."""
    domains = [Domain(name=name, path=f"reference:{name}", tokens=tokens) for name in DOMAINS]
    sequences = load_tokens(domains, loaded.tokenizer, Intake(seed=seed), part="calibration")
    return record(loaded.model, sequences, batch_tokens=4096).mix()


def pruned_set(sums: LayerStatistics, shrinkage: float, prune: int) -> np.ndarray:
    matrix = interaction(sums, product="norms", normalise="co_selected", shrinkage=shrinkage)
    return Swap().solve(problem(Quadratic(matrix), prune)).pruned


def compare(draws: list[dict[str, LayerStatistics]], truth: dict[str, LayerStatistics]) -> list[dict[str, object]]:
    """Per fraction and strength: the mean Jaccard index of two draws' sets, and the mean regret on the long recording.

    Regret: cost of a draw's set on F of the long recording (no shrinkage), over the cost of its own best set, less 1.
    """
    rows: list[dict[str, object]] = []
    for fraction in FRACTIONS:
        for strength in SHRINKAGE:
            jaccard, regret = [], []
            for name, sums in truth.items():
                prune = int(fraction * len(sums.gate_sum))
                sets = [pruned_set(draw[name], strength, prune) for draw in draws]
                exact = Quadratic(interaction(sums, product="norms", normalise="co_selected"))
                best = Swap().solve(problem(exact, prune)).cost
                regret += [exact.cost(one) / best - 1 for one in sets]
                jaccard += [(a & b).sum() / (a | b).sum() for a, b in combinations(sets, 2)]
            rows.append(
                {
                    "fraction": fraction,
                    "shrinkage": strength,
                    "jaccard": f"{np.mean(jaccard):.3f}",
                    "regret": f"{np.mean(regret):.4f}",
                    "regret_se": f"{np.std(regret) / len(regret) ** 0.5:.4f}",
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--tokens", type=int, nargs="+", default=[340, 2048])
    parser.add_argument("--reference-tokens", type=int, default=24576)
    parser.add_argument("--output", type=Path, default=HERE)
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    loaded = load_model(ModelOptions(), device="cpu")
    truth = recorded(loaded, arguments.reference_tokens, seed=1000)
    rows: list[dict[str, object]] = []
    for tokens in arguments.tokens:
        draws = [recorded(loaded, tokens, seed=draw) for draw in range(arguments.draws)]
        total = {"tokens": tokens * len(DOMAINS)}
        rows += [total | row for row in compare(draws, truth)]
    arguments.output.mkdir(parents=True, exist_ok=True)
    with (arguments.output / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    for row in rows:
        print("|", " | ".join(map(str, row.values())), "|")


if __name__ == "__main__":
    main()
