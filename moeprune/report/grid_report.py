"""The report of a grid: report.html (self-contained), report.md with figures/*.png, report.csv."""

from collections.abc import Collection, Sequence
from pathlib import Path

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import write_text
from moeprune.experiment import grid_pictures, grid_tables
from moeprune.experiment.grid_record import Grid, read_grid, read_runs
from moeprune.experiment.grid_statistics import FEW, Standings, repeated, standings
from moeprune.experiment.numbers import listed, percent, rough, share
from moeprune.experiment.report import save_report
from moeprune.experiment.report_parts import Report, Section, Tiles

FORMATS = ("html", "md", "csv")


def write_grid_report(grid_dir: Path, *, formats: Collection[str] = FORMATS) -> Path:
    """The path of the first of html, md, csv that was asked for, written into the grid's directory.

    Reads every run directory below it and grid.json. Raises InputError when it holds no run.
    """
    return _write(read_grid(grid_dir), Path(grid_dir), formats)


def write_comparison(run_dirs: Sequence[Path], target: Path, *, formats: Collection[str] = FORMATS) -> Path:
    """The same report over run directories from anywhere, written into `target`."""
    return _write(read_runs(run_dirs), Path(target), formats)


def _write(grid: Grid, target: Path, formats: Collection[str]) -> Path:
    unknown = [name for name in formats if name not in FORMATS]
    if unknown or not formats:
        raise InputError(f"--format: {', '.join(unknown) or 'nothing'} is not a format; give {listed(FORMATS)}")
    written = []
    if {"html", "md"} & set(formats):
        written += save_report(grid_report(grid), target, formats=formats)
    if "csv" in formats:
        write_text(target / "report.csv", grid_tables.as_csv(grid))
        written.append(target / "report.csv")
    return written[0]


def grid_report(grid: Grid) -> Report:
    """The report's content, in reading order."""
    found = standings(grid)
    sections = [
        overview(grid, found),
        grid_tables.facts(grid),
        grid_tables.unfinished(grid),
        grid_tables.ranks(grid, found),
        grid_pictures.curves(grid),
        grid_tables.by_ratio(grid),
        grid_pictures.worst_domains(grid),
        grid_pictures.sets(grid),
        grid_pictures.objectives(grid),
        grid_pictures.sizes(grid),
        grid_tables.runs(grid),
    ]
    subtitle = f"Report of a grid of {len(grid.runs)} runs"
    return Report(grid.name, subtitle, verdict(grid, found), [section for section in sections if section])


def verdict(grid: Grid, found: Standings | None) -> str:
    """One sentence: who is best by KL, how clearly, its worst domain, and what is not there."""
    counts = {status: sum(run.status == status for run in grid.runs) for status in ("failed", "unfinished", "missing")}
    absent = listed([f"{count} {status}" for status, count in counts.items() if count])
    rest = f"; {absent} of {len(grid.runs)} runs" if absent else ""
    if not grid.done:
        return f"No run of this grid is done yet{rest}."
    if found is None:
        return f"{len(grid.done)} of {len(grid.runs)} runs are done, and there are no two methods to rank{rest}."
    best, second = found.methods[:2]
    lead = "ahead of" if found.conditions >= FEW and not second.rank.level else "not clearly ahead of"
    sentence = (
        f"{best.method} ranks best by KL (mean rank {best.rank.measure} of {len(found.methods)} methods), {lead} "
        f"{second.method} ({second.rank.measure})"
    )
    costs = [_worst_cost(grid, best.method), _best_on_seen(found), *_best_accuracies(grid, found)]
    return f"{sentence}; {'; '.join(filter(None, costs))}{rest}."


def _best_on_seen(found: Standings) -> str:
    """Who is best where calibration looked, when that is not everywhere."""
    ranked = [(standing.rank_seen, standing) for standing in found.methods if standing.rank_seen]
    if not ranked:
        return ""
    rank, best = min(ranked, key=lambda pair: pair[0].measure.value)
    return f"on {listed(found.seen)}, which calibration saw, {best.method} ranks best ({rank.measure})"


def _worst_cost(grid: Grid, method: str) -> str:
    """What the method costs where it prunes most, on its worst domain."""
    groups = {key: runs for key, runs in grid.groups().items() if key[0] == method}
    ratio = max(ratio for _, _, ratio in groups)
    runs = [run for (_, _, share), members in groups.items() if share == ratio for run in members]
    costs = {domain: repeated(runs, f"fidelity/kl/{domain}") for domain in grid.domains}
    known = {domain: cost.value for domain, cost in costs.items() if cost}
    worst = max(known, key=lambda domain: known[domain])
    harm = f"{worst} (KL {rough(known[worst])} nats per token)"
    return f"with {percent(ratio)} of the experts gone its worst domain is {harm}"


def _best_accuracies(grid: Grid, found: Standings) -> list[str]:
    words = []
    for task in grid.tasks:
        known = {s.method: a for s in found.methods if (a := s.accuracies[task])}
        if known:
            top = max(known, key=lambda name: known[name].measure.value)
            level = sum(score.level for score in known.values())
            others = f", not clearly above {level} other{'s' if level > 1 else ''}" if level else ""
            words.append(f"{task} accuracy is highest with {top} ({share(known[top].measure.value)}{others})")
    return words


def overview(grid: Grid, found: Standings | None) -> Section:
    tiles = [("runs done", f"{len(grid.done)} of {len(grid.runs)}", "")]
    tiles.append(("methods", str(len(grid.methods)), ", ".join(grid.methods)))
    if found:
        best = found.methods[0]
        tiles.append(("best mean rank by KL", best.method, f"{best.rank.measure} of {len(found.methods)}"))
        least = min(found.methods, key=lambda standing: standing.relative_worst.measure.value)
        tiles.append(("lowest KL on the worst domain", least.method, f"×{least.relative_worst.measure} of the best"))
    return Section("", [Tiles(tiles)])
