"""writing.png from the table that measure.py wrote.

python plot.py -o .
"""

import argparse
import csv
from pathlib import Path
from statistics import median
from typing import Any

COLORS = {"cp": "#56B4E9", "cp+sync": "#0072B2", "moeprune": "#D55E00"}


def picture(rows: list[dict[str, str]]) -> Any:
    """Wall seconds a GiB written, with the least and the most; before the first byte apart; CPU seconds beside it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 3.2), layout="constrained")
    panels = figure.subplots(1, 2)
    sizes = list(dict.fromkeys(row["gib"] for row in rows))
    kept = {row["gib"]: float(row["bytes"]) / 2**30 for row in rows}
    for panel, field, label in zip(panels, ("seconds", "cpu_seconds"), ("wall seconds", "CPU seconds")):
        for number, (method, color) in enumerate(COLORS.items()):
            for place, size in enumerate(sizes):
                own = [float(row[field]) for row in rows if (row["gib"], row["method"]) == (size, method)]
                mid = median(own)
                spread = [[mid - min(own)], [max(own) - mid]]
                name = method if not place else None
                panel.bar(place + 0.26 * (number - 1), mid, 0.24, color=color, label=name, yerr=spread, capsize=3)
                first = [float(r["first_byte"]) for r in rows if (r["gib"], r["method"]) == (size, method)]
                if field == "seconds" and method == "moeprune":
                    hatch = {"hatch": "//", "fill": False, "edgecolor": "black", "linewidth": 0}
                    told = "of it before the first byte" if not place else None
                    panel.bar(place + 0.26, median(first), 0.24, label=told, **hatch)
        panel.set_xticks(range(len(sizes)), [f"{kept[size]:.1f} GiB" for size in sizes])
        panel.set_ylabel(label)
        panel.grid(axis="y", alpha=0.3)
    panels[0].set_title("Writing what is kept", loc="left")
    panels[0].margins(y=0.4)
    panels[0].legend(frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path())
    arguments = parser.parse_args()
    with (Path(__file__).parent / "results.csv").open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    picture(rows).savefig(arguments.output / "writing.png", dpi=150)


if __name__ == "__main__":
    main()
