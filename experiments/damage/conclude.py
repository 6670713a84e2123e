"""The table and the figure from results.csv: how well each criterion's cost orders sets by the damage they do.

python experiments/damage/conclude.py           # prints the table, writes damage.png
"""

import argparse
import csv
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

SHOWN = ("frequency", "reap", "hope norms all")
RESAMPLES, SEED = 2_000, 0
NOT_COSTS = ("setting", "population", "set", "layer", "kl")
Rows = list[dict[str, str]]


def correlation(cost: np.ndarray, damage: np.ndarray) -> tuple[float, float, float]:
    """Spearman's rank correlation over the sets, and its 95 % interval (percentile bootstrap over sets)."""
    draw = np.random.default_rng(SEED)
    picks = draw.integers(0, len(cost), (RESAMPLES, len(cost)))
    values = [spearmanr(cost[pick], damage[pick]).statistic for pick in picks]
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return float(spearmanr(cost, damage).statistic), float(low), float(high)


def groups_of(rows: Rows) -> dict[tuple[str, str], Rows]:
    groups: dict[tuple[str, str], Rows] = {}
    for row in rows:
        groups.setdefault((row["setting"], row["population"]), []).append(row)
    return groups


def table(rows: Rows) -> str:
    groups = groups_of(rows)
    criteria = [name for name in rows[0] if name not in NOT_COSTS]
    lines = ["| criterion | " + " | ".join(f"{s}: {p}" for s, p in groups) + " |", "|---" * (len(groups) + 1) + "|"]
    cells: dict[str, list[tuple[float, float, float]]] = {name: [] for name in criteria}
    for group in groups.values():
        damage = np.array([float(row["kl"]) for row in group])
        for name in criteria:
            cells[name].append(correlation(np.array([float(row[name]) for row in group]), damage))
    best = [max(cells[name][column][0] for name in criteria) for column in range(len(groups))]
    for name in criteria:
        texts = []
        for column, (value, low, high) in enumerate(cells[name]):
            bold = "**" if value == best[column] else ""
            texts.append(f"{bold}{value:.2f}{bold} [{low:.2f}, {high:.2f}]")
        lines.append(f"| {name} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def by_layer(rows: Rows) -> str:
    """Sets of one layer: the mean KL of each layer's, and the rank correlations within the layer."""
    lines = ["| setting | layer | mean KL | " + " | ".join(SHOWN) + " |", "|---" * (len(SHOWN) + 3) + "|"]
    alone = [row for row in rows if row["layer"] != "all"]
    for setting in dict.fromkeys(row["setting"] for row in alone):
        for layer in sorted({row["layer"] for row in alone}):
            group = [row for row in alone if (row["setting"], row["layer"]) == (setting, layer)]
            damage = [float(row["kl"]) for row in group]
            cells = [f"{spearmanr([float(row[name]) for row in group], damage).statistic:.2f}" for name in SHOWN]
            lines.append(f"| {setting} | {layer} | {np.mean(damage):.3f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def figure(rows: Rows, path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter

    groups = groups_of(rows)
    settings = list(dict.fromkeys(setting for setting, _ in groups))
    looks = {"random": ("#0072B2", "o"), "near": ("#D55E00", "^"), "one layer": ("#009E73", "s")}
    canvas = Figure(figsize=(9.6, 6.4), layout="constrained")
    panels = canvas.subplots(len(settings), len(SHOWN))
    for across, setting in zip(panels, settings, strict=True):
        for axes, name in zip(across, SHOWN, strict=True):
            for population, (color, marker) in looks.items():
                group = groups[setting, population]
                costs = [float(row[name]) for row in group]
                axes.scatter(costs, [float(row["kl"]) for row in group], s=14, c=color, marker=marker, label=population)
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.set_title(f"{name}, {setting}", loc="left", fontsize=10)
            axes.grid(alpha=0.3)
    canvas.supxlabel("cost the criterion gives the set (1 a layer: all of its experts)")
    canvas.supylabel("KL to the unpruned model, nats a token, held out")
    canvas.legend(*panels[0][0].get_legend_handles_labels(), loc="outside upper right", ncols=3, frameon=False)
    canvas.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent)
    arguments = parser.parse_args()
    with (arguments.output / "results.csv").open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    print(table(rows), by_layer(rows), sep="\n\n")
    figure(rows, arguments.output / "damage.png")


if __name__ == "__main__":
    main()
