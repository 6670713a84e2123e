"""Tables and the figure from the grids' results: means over calibration draws with 95 % intervals (Student's t).

    python experiments/ranking/conclude.py  # reads *.csv beside this file, prints the tables, writes ranking.png
    python experiments/ranking/conclude.py --collect runs   # first takes the csv files over from runs/{all,agent,...}
    python experiments/ranking/conclude.py --data experiments/fine-grained  # the same of another folder's csv files

A difference is taken draw by draw, so what a draw does to every method cancels.
"""

import argparse
import csv
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from scipy.stats import t as student

GRIDS = ("all", "agent", "scope", "random")
KEPT = ("fidelity/kl/mean", "fidelity/kl/worst", "fidelity/kl/agent", "task/accuracy/agent")
RATIOS = {"p06": "6.25 %", "p12": "12.5 %", "p25": "25 %", "p50": "50 %", "p75": "75 %"}
MEASURES = {
    "all": ("fidelity/kl/mean", "fidelity/kl/worst", "task/accuracy/agent"),
    "agent": ("fidelity/kl/agent", "task/accuracy/agent"),
}
NAMES = {
    "fidelity/kl/mean": "mean KL",
    "fidelity/kl/worst": "worst KL",
    "fidelity/kl/agent": "KL agent",
    "task/accuracy/agent": "accuracy",
}
Values = dict[str, dict[str, float]]  # method -> draw -> value


def collect(runs: Path, target: Path) -> None:
    """NAME.csv from the grids' report.csv: the run's label and the measures used here."""
    for name in GRIDS:
        with (runs / name / "report.csv").open(encoding="utf-8", newline="") as lines:
            keep([row for row in csv.DictReader(lines) if row["status"] == "done"], target / f"{name}.csv")


def keep(rows: list[dict[str, str]], path: Path) -> None:
    """Of rows of a report.csv the run's label and the measures used here."""
    with path.open("w", encoding="utf-8", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["run", *KEPT])
        writer.writerows([row["run"], *(f"{float(row[measure]):.6g}" for measure in KEPT)] for row in rows)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def values_of(rows: list[dict[str, str]], ratio: str, measure: str) -> Values:
    """Of runs METHOD[-...]-RATIO-DRAW."""
    values: Values = {}
    for row in rows:
        method, its_ratio, draw = row["run"].rsplit("-", 2)
        if its_ratio == ratio:
            values.setdefault(method, {})[draw] = float(row[measure])
    return values


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval."""
    half = student.ppf(0.975, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return mean(values), float(half)


def differences(one: dict[str, float], other: dict[str, float]) -> tuple[float, float]:
    return interval([one[draw] - other[draw] for draw in sorted(one)])


def ratios_of(rows: list[dict[str, str]]) -> list[str]:
    there = {row["run"].rsplit("-", 2)[1] for row in rows}
    return [ratio for ratio in RATIOS if ratio in there]


def means(rows: list[dict[str, str]], grid: str) -> str:
    """Method by ratio and measure; the best in bold."""
    columns = [(ratio, measure) for ratio in ratios_of(rows) for measure in MEASURES[grid]]
    heads = [f"{RATIOS[ratio]}: {NAMES[measure]}" for ratio, measure in columns]
    tables = [values_of(rows, *column) for column in columns]
    lines = ["| method | " + " | ".join(heads) + " |", "|---" * (len(columns) + 1) + "|"]
    for method in tables[0]:
        cells = []
        for (_, measure), table in zip(columns, tables, strict=True):
            middle, half = interval(list(table[method].values()))
            best = (max if "accuracy" in measure else min)(mean(v.values()) for v in table.values())
            digits = 2 if "accuracy" in measure or middle >= 1 else 3
            text = f"{middle:.{digits}f}"
            cells.append(f"{f'**{text}**' if middle == best else text} ± {half:.{digits}f}")
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def against(rows: list[dict[str, str]], grid: str, pairs: Sequence[tuple[str, str]]) -> str:
    """Paired differences in the first measure of the grid; bold where the interval excludes zero."""
    ratios = ratios_of(rows)
    lines = ["| first minus second | " + " | ".join(RATIOS[r] for r in ratios) + " |", "|---" * (len(ratios) + 1) + "|"]
    for one, other in pairs:
        cells = []
        for ratio in ratios:
            values = values_of(rows, ratio, MEASURES[grid][0])
            middle, half = differences(values[one], values[other])
            text = f"{middle:+.3f} ± {half:.3f}"
            cells.append(f"**{text}**" if abs(middle) > half else text)
        lines.append(f"| {one} − {other} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def figure(grids: dict[str, list[dict[str, str]]], path: Path) -> None:
    """Mean KL with intervals, one panel a setting, methods in the order of their mean."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    widest = max(len(ratios_of(rows)) for rows in grids.values())
    canvas = Figure(figsize=(3.5 * widest, 6.6), layout="constrained")
    panels = canvas.subplots(len(grids), widest)
    for across, (grid, rows) in zip(panels, grids.items(), strict=True):
        for axes in across[len(ratios_of(rows)) :]:
            axes.set_axis_off()
        for axes, ratio in zip(across, ratios_of(rows), strict=False):
            ends = {m: interval(list(v.values())) for m, v in values_of(rows, ratio, MEASURES[grid][0]).items()}
            order = sorted(ends, key=lambda method: ends[method][0])
            for place, method in enumerate(order):
                second = method.startswith("hope")
                look: dict[str, Any] = {"color": "#D55E00" if second else "#0072B2", "fmt": "o" if second else "s"}
                axes.errorbar(ends[method][0], place, xerr=ends[method][1], capsize=2, markersize=4, **look)
            axes.set_yticks(range(len(order)), order, fontsize=8)
            axes.invert_yaxis()
            axes.set_xscale("log")
            low, high = axes.get_xlim()
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 3) if high > 10 * low else (1, 1.5, 2, 3, 5, 7)))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.tick_params(axis="x", labelsize=8)
            axes.set_title(f"calibrated on {'six domains' if grid == 'all' else 'agent'}, {RATIOS[ratio]}", fontsize=9)
            axes.grid(axis="x", alpha=0.3, which="both")
    label = "KL to the unpruned model, nats a token (six domains: their mean; agent: agent); 95 % over draws"
    canvas.supxlabel(label, fontsize=10)
    canvas.savefig(path, dpi=130)


def scope_table(rows: list[dict[str, str]]) -> str:
    """Global minus layer budgets, by method and ratio; bold where the interval excludes zero."""
    ratios = ratios_of(rows)
    heads = [f"{RATIOS[ratio]}: {NAMES[measure]}" for ratio in ratios for measure in MEASURES["all"]]
    lines = ["| method | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for method in dict.fromkeys(row["run"].split("-")[0] for row in rows):
        cells = []
        for ratio in ratios:
            for measure in MEASURES["all"]:
                values = values_of(rows, ratio, measure)
                middle, half = differences(values[f"{method}-global"], values[f"{method}-layer"])
                text = f"{middle:+.3f} ± {half:.3f}"
                cells.append(f"**{text}**" if abs(middle) > half else text)
        lines.append(f"| {method}: global − layer | " + " | ".join(cells) + " |")
    return "\n".join(lines)


PAIRS = (
    ("hope_norms_all", "reap"),
    ("hope_norms_co", "reap"),
    ("hope_norms_all", "hope_norms_co"),
    ("hope_norms_all", "reap_l2"),  # pairs on and off: reap_l2 is the diagonal of this F
    ("hope_outputs_all", "hope_norms_all"),
    ("hope_outputs_co", "hope_norms_co"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--collect", type=Path, metavar="RUNS", help="take report.csv of the grids in this directory over"
    )
    parser.add_argument("--data", type=Path, default=Path(__file__).parent, help="where the csv files are")
    arguments = parser.parse_args()
    if arguments.collect:
        collect(arguments.collect, arguments.data)
    grids = {name: read(arguments.data / f"{name}.csv") for name in MEASURES}
    for name, rows in grids.items():
        print(f"\n**{name}: means**\n\n{means(rows, name)}\n\n**{name}: differences**\n\n{against(rows, name, PAIRS)}")
    print(f"\n**scope**\n\n{scope_table(read(arguments.data / 'scope.csv'))}")
    for ratio, measure in [(r, m) for r in RATIOS for m in KEPT]:
        rows = [
            {**row, "run": f"random-{'-'.join(row['run'].split('-')[::-1])}"}
            for row in read(arguments.data / "random.csv")
        ]
        values = list(values_of(rows, ratio, measure)["random"].values())
        print(f"random {RATIOS[ratio]} {NAMES[measure]}: {interval(values)[0]:.3f} ± {interval(values)[1]:.3f}")
    figure(grids, arguments.data / "ranking.png")


if __name__ == "__main__":
    main()
