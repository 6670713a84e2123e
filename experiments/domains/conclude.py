"""The matrix of what a model calibrated on one domain loses on another, and its figure.

python experiments/domains/conclude.py                    # reads results.csv, prints the tables, writes domains.png
python experiments/domains/conclude.py --collect runs     # first takes results.csv over from runs/grid
"""

import argparse
import csv
import math
from pathlib import Path
from statistics import mean, stdev

from scipy.stats import t as student

DOMAINS = ("prose", "python", "c", "json", "math", "agent")
RATIOS = {"p25": "25 %", "p50": "50 %"}
Rows = list[dict[str, str]]


def collect(runs: Path, target: Path) -> None:
    with (runs / "grid" / "report.csv").open(encoding="utf-8", newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["status"] == "done"]
    with target.open("w", encoding="utf-8", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["calibrated", "method", "ratio", "draw", *DOMAINS])
        for row in rows:
            kl = [f"{float(row[f'fidelity/kl/{domain}']):.6g}" for domain in DOMAINS]
            writer.writerow([*row["run"].split("-"), *kl])


def values_of(rows: Rows, calibrated: str, method: str, ratio: str, domain: str) -> list[float]:
    wanted = (calibrated, method, ratio)
    return [float(row[domain]) for row in rows if (row["calibrated"], row["method"], row["ratio"]) == wanted]


def cell(values: list[float]) -> str:
    half = student.ppf(0.975, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return f"{mean(values):.3f} ± {half:.3f}"


def table(rows: Rows, method: str, ratio: str) -> str:
    lines = ["| calibrated on | " + " | ".join(f"KL {d}" for d in DOMAINS) + " |", "|---" * (len(DOMAINS) + 1) + "|"]
    for calibrated in (*DOMAINS, "equal"):
        cells = []
        for domain in DOMAINS:
            text = cell(values_of(rows, calibrated, method, ratio, domain))
            cells.append(f"**{text}**" if domain == calibrated else text)
        lines.append(f"| {calibrated} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def figure(rows: Rows, path: Path) -> None:
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(10, 8.6), layout="constrained")
    panels = canvas.subplots(2, 2)
    names = (*DOMAINS, "equal")
    for across, method in zip(panels, ("hope", "reap"), strict=True):
        for axes, ratio in zip(across, RATIOS, strict=True):
            data = [[mean(values_of(rows, c, method, ratio, d)) for d in DOMAINS] for c in names]
            image = axes.imshow(data, norm=LogNorm(0.005, 5), cmap="cividis_r")
            for down, line in enumerate(data):
                for right, value in enumerate(line):
                    color = "white" if value > 0.5 else "black"
                    axes.text(right, down, f"{value:.2f}", ha="center", va="center", fontsize=8, color=color)
            axes.set_xticks(range(len(DOMAINS)), DOMAINS)
            axes.set_yticks(range(len(names)), names)
            axes.set_title(f"{method}, {RATIOS[ratio]} pruned", loc="left", fontsize=10)
    canvas.supxlabel("measured on")
    canvas.supylabel("calibrated on")
    canvas.colorbar(image, ax=panels, label="KL to the unpruned model, nats a token", shrink=0.6)
    canvas.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--collect", type=Path, metavar="RUNS", help="take report.csv of the grid in this directory over"
    )
    arguments = parser.parse_args()
    path = Path(__file__).parent / "results.csv"
    if arguments.collect:
        collect(arguments.collect, path)
    with path.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    for method in ("hope", "reap"):
        for ratio, name in RATIOS.items():
            print(f"**{method}, {name} pruned**\n\n{table(rows, method, ratio)}\n")
    figure(rows, path.with_name("domains.png"))


if __name__ == "__main__":
    main()
