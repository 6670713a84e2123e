"""The training curve as a figure and as a Markdown table.

python plot_curve.py training-curve.json -o training-curve.png
"""

import argparse
import json
from pathlib import Path
from typing import Any

# Okabe and Ito's colours, told apart with any colour vision; the markers say the same in grey.
STYLES = {
    "prose": ("#0072B2", "o"),
    "python": ("#E69F00", "s"),
    "c": ("#009E73", "^"),
    "json": ("#CC79A7", "D"),
    "math": ("#D55E00", "v"),
    "agent": ("#000000", "P"),
}


def draw(curve: list[dict[str, Any]], path: Path) -> None:
    """Validation perplexity of every domain over training tokens; hollow: the final measurement, over more windows."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    running, final = curve[:-1], curve[-1]
    for domain, value in final["perplexity"].items():
        colour, marker = STYLES[domain]
        tokens = [point["tokens"] / 1e6 for point in running]
        values = [point["perplexity"][domain] for point in running]
        axes.plot(tokens, values, color=colour, marker=marker, markersize=4, linewidth=1.5)
        end = final["tokens"] / 1e6, value  # more windows than the points before: not on the same line
        axes.plot(*end, color=colour, marker=marker, markersize=7, markerfacecolor="none")
        axes.annotate(f"{domain} {value:.1f}", end, (8, 0), textcoords="offset points", va="center")
    axes.set(xscale="log", yscale="log", xlabel="training tokens (millions)", ylabel="validation perplexity")
    axes.set_xlim(curve[0]["tokens"] / 1e6 * 0.9, final["tokens"] / 1e6 * 1.6)
    axes.set_yticks([1, 2, 5, 10, 20, 50, 100, 200, 500], labels=["1", "2", "5", "10", "20", "50", "100", "200", "500"])
    axes.set_xticks([0.5, 1, 2, 5, 10, 20], labels=["0.5", "1", "2", "5", "10", "20"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def table(curve: list[dict[str, Any]], rows: int) -> str:
    """About `rows` points of the curve, the last always among them."""
    domains = list(curve[-1]["perplexity"])
    lines = [f"| million tokens | loss | windows | {' | '.join(domains)} |", "|---|" + "---|" * (len(domains) + 2)]
    step = max(1, round(len(curve) / rows))
    for point in curve[:-1][::step] + curve[-1:]:
        values = " | ".join(f"{point['perplexity'][domain]:.1f}" for domain in domains)
        lines.append(f"| {point['tokens'] / 1e6:.1f} | {point['loss']:.2f} | {point['windows']} | {values} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curve", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("training-curve.png"))
    parser.add_argument("--rows", type=int, default=8)
    options = parser.parse_args(arguments)
    curve = json.loads(options.curve.read_text())
    draw(curve, options.output)
    print(table(curve, options.rows))
    print(options.output)


if __name__ == "__main__":
    main()
