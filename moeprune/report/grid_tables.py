"""Tables of a grid's report: runs against the fields that differ, ranks, results by ratio, and the csv."""

import csv
import io

from moeprune.report.grid_record import ABSENT, Grid, GridRun, short_keys
from moeprune.report.page import Cell, Paragraph, Part, Section, Table
from moeprune.report.ranks import FEW, Score, Standings, repeated
from moeprune.report.run_record import measure
from moeprune.report.style import listed, percent


def runs(grid: Grid) -> Section:
    """Every run against the config fields in which runs differ; runs that are not done are shown as such."""
    keys = grid.differing
    short = short_keys(keys)
    rows: list[list[str | Cell]] = []
    for run in grid.runs:
        values = [run.fields.get(key, ABSENT) for key in keys]
        rows.append([f"`{run.name}`", *values, *_outcomes(grid, run)])
    columns = ["Run", *(short[key] for key in keys), "#Pruned", "#KL, mean", "#KL, worst", "Worst domain"]
    columns += [f"#{task} accuracy" for task in grid.tasks]
    return Section("Runs", [Table(columns, rows, "KL in nats per token, over the evaluated domains.")])


def _outcomes(grid: Grid, run: GridRun) -> list[str | Cell]:
    ratio = "–" if run.ratio is None else percent(run.ratio, places=1)
    if run.status != "done":
        blanks: list[str | Cell] = ["–"] * (2 + len(grid.tasks))
        return [ratio, Cell(run.status, "bad"), *blanks]
    domains = [d for d in grid.domains if f"fidelity/kl/{d}" in run.metrics]
    worst = max(domains, key=lambda domain: run.metrics[f"fidelity/kl/{domain}"], default="–")
    cells = [measure(run.metrics, name) for name in ("fidelity/kl/mean", f"fidelity/kl/{worst}")]
    accuracies = [measure(run.metrics, f"task/accuracy/{task}") for task in grid.tasks]
    shown = [str(cell) if cell else "–" for cell in cells]
    return [ratio, *shown, worst, *(a.as_share if a else "–" for a in accuracies)]


def unfinished(grid: Grid) -> Section | None:
    """The runs that are not done, and why."""
    rows: list[list[str | Cell]] = [
        [f"`{run.name}`", Cell(run.status, "bad"), run.reason] for run in grid.runs if run.status != "done"
    ]
    if not rows:
        return None
    note = "They are left out of every figure and rank. The same `moeprune grid` command goes on where it was."
    return Section("Failed, unfinished and missing runs", [Table(["Run", "State", "Why"], rows, note)])


def ranks(grid: Grid, found: Standings | None) -> Section:
    """Methods by mean rank, with intervals over conditions."""
    title = "Ranks"
    if found is None:
        why = "only one method was run" if len(grid.methods) < 2 else "no condition was measured for every method"
        return Section(title, [Paragraph(f"There is nothing to rank: {why}.")])
    pairs = found.conditions * found.domains
    rows: list[list[str | Cell]] = [
        [
            s.method,
            _cell(s.rank, s.rank.measure),
            *([_cell(s.rank_seen, s.rank_seen.measure)] if s.rank_seen else []),
            f"{s.wins} of {pairs}",
            _cell(s.relative, s.relative.measure, sign="×"),
            _cell(s.relative_worst, s.relative_worst.measure, sign="×"),
            *(Cell("–", "note") if a is None else _cell(a, a.measure.as_share) for a in s.accuracies.values()),
        ]
        for s in found.methods
    ]
    several = found.conditions > 1
    note = (
        f"Over {found.conditions} condition{'s' if several else ''} and {found.domains} domains; rank 1 is best. KL "
        "against the best: divided by the lowest of the condition, geometric mean. "
    )
    note += (
        "Intervals: 95 % bootstrap over conditions. Best value shaded; ≈: the paired difference from it may be 0."
        if several
        else "One condition alone gives no intervals; repeat it with other calibration draws to get them."
    )
    if several and found.conditions < FEW:
        note += f" So few conditions make intervals too narrow; {FEW} or more are wanted."
    if found.left_out:
        note += f" Conditions that not every method was measured under are left out: {found.left_out}."
    names = ["Method", "#Mean rank", "#Lowest KL in", "#KL against the best", "#On the worst domain"]
    if found.seen:
        names.insert(2, f"#Rank on {listed(found.seen)}")
        note += f" Calibration saw {listed(found.seen)} alone: on the other domains ranks tell what was lost by chance."
    return Section(title, [Table([*names, *(f"#{task} accuracy" for task in grid.tasks)], rows, note)])


def _cell(score: Score, shown: object, *, sign: str = "") -> Cell:
    return Cell(f"{'≈ ' if score.level else ''}{sign}{shown}", "best" if score.best else "")


def by_ratio(grid: Grid) -> Section:
    """Means over repeated runs for every method, setting and ratio, with the range of the repeats."""
    groups = grid.groups()
    settings = {setting for _, setting, _ in groups}
    rows: list[list[str | Cell]] = []
    for (method, setting, ratio), members in sorted(groups.items(), key=lambda item: (item[0][2], item[0][1])):
        row: list[str | Cell] = [percent(ratio, places=1), method]
        if settings != {""}:
            row.append(setting or "as in base")
        row.append(str(len(members)))
        for name in _measures(grid):
            value = repeated(members, name)
            row.append("–" if value is None else value.as_share if name.startswith(("task/", "gen")) else str(value))
        rows.append(row)
    columns = ["#Pruned", "Method", *(["Setting"] if settings != {""} else []), "#Runs"]
    columns += [f"#{_words(name)}" for name in _measures(grid)]
    note = "Brackets: smallest and largest of repeated runs; the run's own 95 % interval where there is one run."
    return Section("By ratio", [Table(columns, rows, note)])


def _measures(grid: Grid) -> list[str]:
    names = [f"fidelity/kl/{domain}" for domain in grid.domains]
    names += [f"task/accuracy/{task}" for task in grid.tasks]
    return names + (["generation/loop_rate"] if any("generation/loop_rate" in run.metrics for run in grid.done) else [])


def _words(name: str) -> str:
    kind, *_, last = name.split("/")
    return {"fidelity": f"KL, {last}", "task": f"{last} accuracy"}.get(kind, "Loop rate")


def facts(grid: Grid) -> Section:
    """The config fields that every run shares would fill pages; those that differ, with the values they take."""
    rows = []
    for key in grid.differing:
        values = dict.fromkeys(run.fields.get(key, ABSENT) for run in grid.runs if run.fields)
        rows.append([f"`{key}`", ", ".join(values)])
    parts: list[Part] = (
        [Table(["Field", "Values"], rows)] if rows else [Paragraph("Runs do not differ in their config.")]
    )
    return Section("What was varied", parts)


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
