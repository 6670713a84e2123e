"""Tables and the figure from results.csv: means over draws, and paired differences with 95 % intervals.

    python experiments/criteria/compare.py          # prints the tables, writes criteria.png

A difference is taken draw by draw, so what a draw does to every rule cancels; its interval is Student's t over draws.
"""

import argparse
import csv
import math
from pathlib import Path
from statistics import mean, stdev
from typing import Any

# Half the width of a 95 % interval of a mean, in standard errors, for 2 to 10 draws.
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
NEW = ("reroute", "worst_domain 0", "worst_domain 1", "portfolio", "portfolio worst")
PUBLISHED = ("frequency", "ean", "reap", "reap_l2", "hope co_selected", "hope all_tokens")
RIVALS = ("hope co_selected", "hope all_tokens", "reap")
# What is measured over the domains that were calibrated on: with one domain, mean and worst are that one.
MEASURES = {
    "all 6.25 %": ("kl mean", "kl worst"),
    "all 12.5 %": ("kl mean", "kl worst"),
    "agent 50 %": ("kl agent",),
}
COLORS = {"reroute": "#0072B2", "worst_domain 0": "#009E73", "worst_domain 1": "#D55E00"}
COLORS |= {"portfolio": "#CC79A7", "portfolio worst": "#000000"}
MARKERS = {"reroute": "o", "worst_domain 0": "^", "worst_domain 1": "s", "portfolio": "D", "portfolio worst": "v"}
Values = dict[str, dict[int, float]]  # criterion -> draw -> value


def values_of(rows: list[dict[str, str]], setting: str, measure: str) -> Values:
    out: Values = {}
    for row in rows:
        if row["setting"] == setting:
            out.setdefault(row["criterion"], {})[int(row["draw"])] = float(row[measure])
    return out


def paired(one: dict[int, float], other: dict[int, float]) -> tuple[float, float]:
    """Mean difference over the draws of both, and half the width of its 95 % interval (nan for a single draw)."""
    differences = [one[draw] - other[draw] for draw in sorted(one.keys() & other.keys())]
    if len(differences) < 2:
        return mean(differences), math.nan
    return mean(differences), STUDENT[len(differences)] * stdev(differences) / math.sqrt(len(differences))


def best_published(values: Values) -> str:
    """The published rule with the lowest mean: chosen with hindsight, which favours it."""
    return min((name for name in PUBLISHED if name in values), key=lambda name: mean(values[name].values()))


def means(rows: list[dict[str, str]]) -> str:
    columns = [
        (setting, measure) for setting, measures in MEASURES.items() for measure in (*measures, "agent accuracy")
    ]
    lines = ["| rule | " + " | ".join(f"{s}: {m.removeprefix('kl ')}" for s, m in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    table = {column: values_of(rows, *column) for column in columns}
    for rule in dict.fromkeys(row["criterion"] for row in rows):
        cells = []
        for column in columns:
            values = table[column]
            own = mean(values[rule].values())
            best = (max if "accuracy" in column[1] else min)(mean(v.values()) for v in values.values())
            text = f"{own:.3f}" if column[1] != "agent accuracy" else f"{own:.2f}"
            cells.append(f"**{text}**" if own == best else text)
        lines.append(f"| {rule} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def differences(rows: list[dict[str, str]]) -> str:
    lines = [
        "| setting, measure | rule | " + " | ".join(f"minus {r}" for r in RIVALS) + " | minus the best published |"
    ]
    lines.append("|---" * (len(RIVALS) + 3) + "|")
    for setting, measures in MEASURES.items():
        for measure in (*measures, "agent accuracy"):
            values = values_of(rows, setting, measure)
            for rule in (name for name in NEW if name in values):
                cells = [_cell(paired(values[rule], values[rival])) for rival in RIVALS if rival in values]
                if measure != "agent accuracy":
                    best = best_published(values)
                    cells.append(f"{_cell(paired(values[rule], values[best]))} ({best})")
                lines.append(f"| {setting}, {measure} | {rule} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(difference: tuple[float, float]) -> str:
    middle, half = difference
    text = f"{middle:+.3f} ± {half:.3f}"
    return f"**{text}**" if abs(middle) > half else text


def figure(rows: list[dict[str, str]]) -> Any:
    """Differences of the new rules from the rivals, one panel a measure; left of 0 is better."""
    from matplotlib.figure import Figure

    panels = [(setting, measure) for setting, measures in MEASURES.items() for measure in measures]
    canvas = Figure(figsize=(9.6, 6.0), layout="constrained")
    grid = canvas.subplots(2, 3).flat
    for axes, (setting, measure) in zip(grid, panels):
        values = values_of(rows, setting, measure)
        best = best_published(values)
        rivals = {**{rival: rival for rival in RIVALS}, best: f"best published:\n{best}"}
        for number, rule in enumerate(NEW):
            ends = [paired(values[rule], values[rival]) for rival in rivals]
            places = [place + 0.15 * (number - 2) for place in range(len(rivals))]
            axes.errorbar(
                [end[0] for end in ends],
                places,
                xerr=[end[1] for end in ends],
                fmt=MARKERS[rule],
                color=COLORS[rule],
                capsize=3,
                label=rule,
            )
        axes.axvline(0, color="0.4", linewidth=1)
        axes.set_yticks(range(len(rivals)), list(rivals.values()), fontsize=8)
        axes.invert_yaxis()
        axes.set_title(f"{setting}: {measure}", loc="left", fontsize=10)
        axes.grid(axis="x", alpha=0.3)
    last = canvas.axes[-1]
    last.axis("off")
    title = "KL of the rule minus\nKL of the rival"
    last.legend(*canvas.axes[0].get_legend_handles_labels(), frameon=False, loc="center", title=title)
    canvas.supxlabel("nats a token, mean and 95 % interval over calibration draws; below 0 the new rule is better")
    return canvas


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent)
    arguments = parser.parse_args()
    with (arguments.output / "results.csv").open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    print(means(rows), differences(rows), sep="\n\n")
    figure(rows).savefig(arguments.output / "criteria.png", dpi=130)


if __name__ == "__main__":
    main()
