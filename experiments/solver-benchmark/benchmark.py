"""Time and cost of every solver on the same matrices; writes results.csv, certificates.csv and solvers.png.

python experiments/solver-benchmark/benchmark.py [--experts 16 32 ...] [--output DIR]
"""

import argparse
import csv
import os
import time
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy: one thread, as the figures say
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from synthetic import KINDS, matrix

from moeprune.selection.objective import Problem, Quadratic, Solution, problem
from moeprune.selection.solvers.certificate import certified, gap_of
from moeprune.selection.solvers.table import Exact, Greedy, Relaxed, Slsqp, Solver, Swap, Thorough

HERE = Path(__file__).parent
SCALES = (1e-9, 1e6)
COLOURS = {"greedy": "#999999", "relaxed": "#E69F00", "swap": "#0072B2", "thorough": "#009E73", "slsqp": "#D55E00"}
COLOURS["exact"] = "#000000"


def solvers(experts: int, slsqp_seconds: float) -> list[Solver]:
    """The solvers that are tried at this size; exact up to 64 experts, where it ends in seconds."""
    tried: list[Solver] = [Greedy(), Relaxed(), Swap(), Thorough(), Slsqp(time_limit=slsqp_seconds)]
    return [*tried, Exact(time_limit=20.0)] if experts <= 64 else tried


def instances(experts: int) -> list[tuple[dict[str, object], Problem]]:
    """Every kind, half of the experts pruned, in its own unit and in a small or a large one; normalisations rotate."""
    found = []
    for number, kind in enumerate(KINDS):
        turn = number + experts.bit_length()
        normalise = ("co_selected", "all_tokens")[turn % 2]
        costs = matrix(kind, experts, normalise=normalise, seed=0)
        for scale in (1.0, SCALES[turn % len(SCALES)]):
            described = {"experts": experts, "kind": kind, "normalise": normalise, "scale": scale}
            found.append((described, problem(Quadratic(costs * scale), experts // 2)))
    return found


def compare(experts: int, slsqp_seconds: float) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """One row per instance and solver (gap to the best cost any of them found), one per certificate."""
    rows, bounds = [], []
    for described, case in instances(experts):
        tried = (
            solvers(experts, slsqp_seconds) if described["scale"] == 1 else [Swap(), Slsqp(time_limit=slsqp_seconds)]
        )
        solved = {solver.name: timed(solver, case) for solver in tried}  # type: ignore[attr-defined]
        best = min(solution.cost for solution in solved.values())
        for name, solution in solved.items():
            gap = (solution.cost - best) / abs(best)
            rows.append(
                described
                | {
                    "solver": name,
                    "cost": repr(solution.cost),
                    "gap": f"{gap:.3e}",
                    "seconds": f"{solution.seconds:.4f}",
                    "status": solution.status,
                }
            )
            print(*rows[-1].values(), sep="\t", flush=True)
        if experts <= 128 and described["scale"] == 1:
            bounds.append(described | certificate(case, solved["swap"]))
            print("certificate", *bounds[-1].values(), sep="\t", flush=True)
    return rows, bounds


def timed(solver: Solver, case: Problem) -> Solution:
    """The solution with its CPU seconds: on one thread the same as the wall clock of an idle machine."""
    started = time.process_time()
    solution = solver.solve(case)
    return replace(solution, seconds=time.process_time() - started)


def certificate(case: Problem, solution: Solution) -> dict[str, object]:
    started = time.process_time()
    found, _ = certified(case, solution)
    assert found.bound is not None
    return {
        "status": found.status,
        "gap": f"{gap_of(found.cost, found.bound):.3e}",
        "seconds": f"{time.process_time() - started:.3f}",
    }


def write(path: Path, rows: list[dict[str, object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def table(rows: list[dict[str, object]]) -> str:
    """Markdown: per size and solver the median time and the mean and worst gap, other units than 1 apart."""
    lines = [
        "| experts | solver | median CPU s | mean gap | worst gap | worst gap in other units |",
        "|---|---|---|---|---|---|",
    ]
    for experts in sorted({row["experts"] for row in rows}):  # type: ignore[type-var]
        for name in COLOURS:
            mine = [row for row in rows if row["experts"] == experts and row["solver"] == name]
            if mine:
                seconds = np.median([float(str(row["seconds"])) for row in mine])
                own = [float(str(row["gap"])) for row in mine if row["scale"] == 1]
                other = [f"{float(str(row['gap'])):.2%}" for row in mine if row["scale"] != 1]
                worst = max(other, key=lambda text: float(text[:-1]), default="-")
                lines.append(f"| {experts} | {name} | {seconds:.3f} | {np.mean(own):.2%} | {max(own):.2%} | {worst} |")
    return "\n".join(lines)


def draw(path: Path, rows: list[dict[str, object]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    sizes = sorted({int(str(row["experts"])) for row in rows})
    for name, colour in COLOURS.items():
        mine = [row for row in rows if row["solver"] == name]
        here = [size for size in sizes if any(row["experts"] == size for row in mine)]
        mine = [row for row in mine if row["scale"] == 1]
        seconds = [np.median([float(str(r["seconds"])) for r in mine if r["experts"] == size]) for size in here]
        gaps = [max(float(str(r["gap"])) for r in mine if r["experts"] == size) for size in here]
        axes[0].plot(here, seconds, "o-", color=colour, label=name)
        axes[1].plot(here, np.maximum(gaps, 1e-6), "o-", color=colour, label=name)
    for axis, title in zip(axes, ("median CPU seconds, one thread", "worst gap to the best cost found (floor 1e-6)")):
        axis.set(xscale="log", yscale="log", xlabel="experts, half of them pruned", title=title)
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experts", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512])
    parser.add_argument("--slsqp-seconds", type=float, default=30.0)
    parser.add_argument("--output", type=Path, default=HERE)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    timed(Swap(starts=4), instances(32)[0][1])  # imports are not what is measured
    rows: list[dict[str, object]] = []
    bounds: list[dict[str, object]] = []
    for experts in arguments.experts:
        more, certificates = compare(experts, arguments.slsqp_seconds)
        rows += more
        bounds += certificates
    write(arguments.output / "results.csv", rows)
    if bounds:
        write(arguments.output / "certificates.csv", bounds)
    draw(arguments.output / "solvers.png", rows)
    print(table(rows))


if __name__ == "__main__":
    main()
