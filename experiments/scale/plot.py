"""scale.png from the table that measure.py wrote.

python plot.py -o .
"""

import argparse
import csv
from pathlib import Path
from statistics import median
from typing import Any

# Okabe & Ito's colours, with a marker each: readable without colour
WAYS = {
    "record in memory": ("#D55E00", "s"),
    "record streamed": ("#0072B2", "o"),
    "compress streamed": ("#009E73", "^"),
}


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def memory(rows: list[dict[str, str]]) -> Any:
    """Peak memory over the process at start, against the size of the model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 3.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    by_layers = [row for row in rows if row["experts"] == "32"]
    by_experts = [row for row in rows if row["layers"] == "24"]
    for panel, axis, chosen in zip(panels, ("layers", "experts"), (by_layers, by_experts)):
        points = sorted({int(row[axis]) for row in chosen})
        for size, label, style in (("weights_mib", "all weights, float32", "--"), ("layer_mib", "one layer", ":")):
            known = {int(row[axis]): float(row[size]) for row in chosen}
            panel.plot(points, [known[point] for point in points], style, color="black", label=label)
        for way, (color, marker) in WAYS.items():
            found: dict[int, list[float]] = {}
            for row in chosen:
                if row["way"] == way:
                    found.setdefault(int(row[axis]), []).append(float(row["peak_mib"]))
            places = sorted(found)
            panel.plot(places, [median(found[place]) for place in places], color=color, marker=marker, label=way)
        panel.set_yscale("log")
        panel.set_xlabel(f"{axis} ({'32 experts' if axis == 'layers' else '24 layers'})")
        panel.set_xticks(points, [str(point) for point in points])
        panel.grid(axis="y", alpha=0.3)
    panels[0].set_ylabel("peak memory, MiB")
    panels[0].set_title("What a pass holds", loc="left")
    panels[1].legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path())
    here = Path(__file__).parent
    arguments = parser.parse_args()
    memory(rows_of(here / "results.csv")).savefig(arguments.output / "scale.png", dpi=150)


if __name__ == "__main__":
    main()
