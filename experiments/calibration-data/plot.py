"""mix.png and tokens.png from the tables that measure.py wrote.

python plot.py -o .
"""

import argparse
import csv
from pathlib import Path
from statistics import mean
from typing import Any

DOMAINS = ("prose", "python", "c", "json", "math", "agent")
# Okabe & Ito's colours, with a marker each: readable without colour
STYLES = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#E69F00", "v"), ("#56B4E9", "P"))


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def mixes(rows: list[dict[str, str]], prune: str) -> Any:
    """KL by domain, one kind of points a mix."""
    from matplotlib.figure import Figure

    chosen = [row for row in rows if row["prune"] == prune]
    figure = Figure(figsize=(7.6, 3.6), layout="constrained")
    axes = figure.subplots()
    for number, ((color, marker), row) in enumerate(zip(STYLES, chosen)):
        values = [float(row[f"kl {name}"]) for name in DOMAINS]
        places = [place + 0.1 * (number - 2.5) for place in range(len(DOMAINS))]
        axes.plot(places, values, marker, color=color, label=row["mix"])
    axes.set_xticks(range(len(DOMAINS)), DOMAINS)
    axes.set_yscale("log")
    axes.set_yticks([0.001, 0.01, 0.1, 1], ["0.001", "0.01", "0.1", "1"])
    axes.set_ylabel("KL(base || pruned), nats a token")
    axes.set_title(f"What the calibration mix keeps ({100 * float(prune):g} % of the experts pruned)", loc="left")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(title="calibrated on", frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def amounts(rows: list[dict[str, str]]) -> Any:
    """Agreement of the two halves, agreement with all data, and KL, over the number of tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 6.4), layout="constrained")
    measures = {
        "jaccard of halves": "agreement of halves\n(Jaccard)",
        "jaccard with all data": "agreement with\nall data (Jaccard)",
        "kl agent": "KL on held-out data\n(nats a token)",
    }
    panels = figure.subplots(len(measures), 1, sharex=True)
    criteria = list(dict.fromkeys(row["criterion"] for row in rows))
    limits = sorted({int(row["tokens"]) for row in rows})
    for panel, (measure, label) in zip(panels, measures.items()):
        for (color, marker), criterion in zip(STYLES, criteria):
            own = [row for row in rows if row["criterion"] == criterion]
            each = [[float(r[measure]) for r in own if int(r["tokens"]) == limit] for limit in limits]
            panel.plot(limits, [mean(values) for values in each], color=color, marker=marker, label=criterion)
            panel.fill_between(limits, list(map(min, each)), list(map(max, each)), color=color, alpha=0.15, linewidth=0)
        panel.set_ylabel(label)
        panel.grid(alpha=0.3)
    panels[-1].set_yscale("log")
    panels[-1].set_yticks([0.03, 0.06, 0.1, 0.2], ["0.03", "0.06", "0.1", "0.2"])
    panels[-1].minorticks_off()
    panels[-1].set_xscale("log", base=2)
    panels[-1].set_xticks(limits, [f"{limit // 1024} k" for limit in limits])
    panels[-1].set_xlabel("calibration tokens (agent trajectories; half of the experts pruned; band: three samples)")
    panels[0].legend(frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1))
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path())
    folder = parser.parse_args().output
    mixes(rows_of(folder / "mix.csv"), "0.25").savefig(folder / "mix.png", dpi=150)
    amounts(rows_of(folder / "tokens.csv")).savefig(folder / "tokens.png", dpi=150)


if __name__ == "__main__":
    main()
