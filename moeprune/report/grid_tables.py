"""Tables of a grid's report: runs against the fields that differ, ranks, results by ratio, and the csv."""

import csv
import io

from moeprune.report.grid_record import ABSENT, Grid, GridRun, short_keys
from moeprune.report.page import Table, bad, best
from moeprune.report.ranks import Score, Standings, repeated
from moeprune.report.run_record import measure
from moeprune.report.style import listed, percent


def run_table(grid: Grid) -> Table:
    """Every run against the config fields in which runs differ; runs that are not done are shown as such."""
    keys, short = grid.differing, short_keys(grid.differing)
    rows = [
        [f"`{run.name}`", *(run.fields.get(key, ABSENT) for key in keys), *_outcomes(grid, run)] for run in grid.runs
    ]
    columns = ["Run", *(short[key] for key in keys), "#Pruned", "#KL, mean", "#KL, worst", "Worst domain"]
    return Table([*columns, *(f"#{task} accuracy" for task in grid.tasks)], rows)


def _outcomes(grid: Grid, run: GridRun) -> list[str]:
    ratio = "–" if run.ratio is None else percent(run.ratio, places=1)
    if run.status != "done":
        return [ratio, bad(run.status), *["–"] * (2 + len(grid.tasks))]
    domains = [d for d in grid.domains if f"fidelity/kl/{d}" in run.metrics]
    worst = max(domains, key=lambda domain: run.metrics[f"fidelity/kl/{domain}"], default="–")
    cells = [measure(run.metrics, name) for name in ("fidelity/kl/mean", f"fidelity/kl/{worst}")]
    accuracies = [measure(run.metrics, f"task/accuracy/{task}") for task in grid.tasks]
    shown = [str(cell) if cell else "–" for cell in cells]
    return [ratio, *shown, worst, *(a.as_share if a else "–" for a in accuracies)]


def open_runs(grid: Grid) -> Table | None:
    """The runs that are not done, and why."""
    rows = [[f"`{run.name}`", bad(run.status), run.reason] for run in grid.runs if run.status != "done"]
    return Table(["Run", "State", "Why"], rows) if rows else None


def rank_table(grid: Grid, ranks: Standings | None) -> Table | None:
    """Methods by mean rank, with intervals over conditions."""
    if ranks is None:
        return None
    pairs = ranks.conditions * ranks.domains
    rows = [
        [
            method.method,
            _cell(method.rank, method.rank.measure),
            *([_cell(method.rank_seen, method.rank_seen.measure)] if method.rank_seen else []),
            f"{method.wins} of {pairs}",
            _cell(method.relative, f"×{method.relative.measure}"),
            _cell(method.relative_worst, f"×{method.relative_worst.measure}"),
            *("–" if score is None else _cell(score, score.measure.as_share) for score in method.accuracies.values()),
        ]
        for method in ranks.methods
    ]
    columns = ["Method", "#Mean rank", *([f"#Rank on {listed(ranks.seen)}"] if ranks.seen else []), "#Lowest KL in"]
    columns += ["#KL against the best", "#On the worst domain", *(f"#{task} accuracy" for task in grid.tasks)]
    return Table(columns, rows)


def _cell(score: Score, shown: object) -> str:
    text = f"≈ {shown}" if score.level else str(shown)
    return best(text) if score.best else text


def ratio_table(grid: Grid) -> Table:
    """Means over repeated runs for every method, setting and ratio, with the range of the repeats."""
    groups = grid.groups()
    varied = {setting for _, setting, _ in groups} != {""}
    rows = []
    for (method, setting, ratio), members in sorted(groups.items(), key=lambda item: (item[0][2], item[0][1])):
        row = [percent(ratio, places=1), method, *([setting or "as in base"] if varied else []), str(len(members))]
        for name in _measures(grid):
            value = repeated(members, name)
            row.append("–" if value is None else value.as_share if name.startswith(("task/", "gen")) else str(value))
        rows.append(row)
    columns = ["#Pruned", "Method", *(["Setting"] if varied else []), "#Runs"]
    return Table([*columns, *(f"#{_words(name)}" for name in _measures(grid))], rows)


def _measures(grid: Grid) -> list[str]:
    names = [f"fidelity/kl/{domain}" for domain in grid.domains]
    names += [f"task/accuracy/{task}" for task in grid.tasks]
    return names + (["generation/loop_rate"] if any("generation/loop_rate" in run.metrics for run in grid.done) else [])


def _words(name: str) -> str:
    kind, *_, last = name.split("/")
    return {"fidelity": f"KL, {last}", "task": f"{last} accuracy"}.get(kind, "Loop rate")


def varied(grid: Grid) -> Table | None:
    """The config fields that differ, with the values they take."""
    rows = []
    for key in grid.differing:
        values = dict.fromkeys(run.fields.get(key, ABSENT) for run in grid.runs if run.fields)
        rows.append([f"`{key}`", ", ".join(values)])
    return Table(["Field", "Values"], rows) if rows else None


def as_csv(grid: Grid) -> str:
    """One line a run: state, method, pruned share, the fields that differ, and every metric of its own."""
    metrics = sorted({name for run in grid.runs for name in run.metrics})
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["run", "status", "reason", "method", "pruned_share", *grid.differing, *metrics])
    for run in grid.runs:
        fields = [run.fields.get(key, "") for key in grid.differing]
        ratio = "" if run.ratio is None else run.ratio
        values = [run.metrics.get(name, "") for name in metrics]
        writer.writerow([run.name, run.status, run.reason, grid.names.get(run.name, ""), ratio, *fields, *values])
    return out.getvalue()
