"""The report of a grid: report.html (self-contained), report.md with figures/*.png, report.csv."""

from collections.abc import Collection, Sequence
from pathlib import Path

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import write_text
from moeprune.report import grid_pictures, grid_tables
from moeprune.report.grid_record import Grid, read_grid, read_runs
from moeprune.report.page import Report
from moeprune.report.ranks import FEW, Standings, correlations, predictions, repeated, standings
from moeprune.report.style import listed, percent, rough, share

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
    written = grid_report(grid).save(target, formats=formats) if {"html", "md"} & set(formats) else []
    if "csv" in formats:
        write_text(target / "report.csv", grid_tables.as_csv(grid))
        written.append(target / "report.csv")
    return written[0]


def grid_report(grid: Grid) -> Report:
    """grid.md.jinja with the values of this grid."""
    ranks, costs = standings(grid), predictions(grid)
    curves, rows = grid_pictures.curves(grid), grid_pictures.kl_rows(grid)
    pictures = [
        *curves.values(),
        grid_pictures.worst_domains(grid, rows),
        grid_pictures.sets(grid),
        grid_pictures.objectives(grid, costs),
        grid_pictures.sizes(grid),
    ]
    values = {
        "grid": grid,
        "verdict": verdict(grid, ranks),
        "first_numbers": first_numbers(grid, ranks),
        "varied": grid_tables.varied(grid),
        "open_runs": grid_tables.open_runs(grid),
        "ranks": ranks,
        "rank_table": grid_tables.rank_table(grid, ranks),
        "seen": listed(ranks.seen) if ranks else "",
        "few": FEW,
        "curves": curves,
        "ratio_table": grid_tables.ratio_table(grid),
        "kl_rows": rows,
        "most_rows": grid_pictures.ROWS,
        "correlations": correlations(costs),
        "run_table": grid_tables.run_table(grid),
    }
    return Report("grid.md.jinja", grid.name, values, {picture.stem: picture for picture in pictures if picture})


def verdict(grid: Grid, ranks: Standings | None) -> str:
    """One sentence: who is best by KL, how clearly, its worst domain, and what is not there."""
    counts = {status: sum(run.status == status for run in grid.runs) for status in ("failed", "unfinished", "missing")}
    absent = listed([f"{count} {status}" for status, count in counts.items() if count])
    rest = f"; {absent} of {len(grid.runs)} runs" if absent else ""
    if not grid.done:
        return f"No run of this grid is done yet{rest}."
    if ranks is None:
        return f"{len(grid.done)} of {len(grid.runs)} runs are done, and there are no two methods to rank{rest}."
    best, second = ranks.methods[:2]
    lead = "ahead of" if ranks.conditions >= FEW and not second.rank.level else "not clearly ahead of"
    sentence = (
        f"{best.method} ranks best by KL (mean rank {best.rank.measure} of {len(ranks.methods)} methods), {lead} "
        f"{second.method} ({second.rank.measure})"
    )
    costs = [_worst_cost(grid, best.method), _best_on_seen(ranks), *_best_accuracies(grid, ranks)]
    return f"{sentence}; {'; '.join(filter(None, costs))}{rest}."


def _best_on_seen(ranks: Standings) -> str:
    """Who is best where calibration looked, when that is not everywhere."""
    seen = [(standing.rank_seen, standing) for standing in ranks.methods if standing.rank_seen]
    if not seen:
        return ""
    rank, best = min(seen, key=lambda pair: pair[0].measure.value)
    return f"on {listed(ranks.seen)}, which calibration saw, {best.method} ranks best ({rank.measure})"


def _worst_cost(grid: Grid, method: str) -> str:
    """What the method costs where it prunes most, on its worst domain."""
    groups = {key: runs for key, runs in grid.groups().items() if key[0] == method}
    ratio = max(ratio for _, _, ratio in groups)
    runs = [run for (_, _, share), members in groups.items() if share == ratio for run in members]
    costs = {domain: repeated(runs, f"fidelity/kl/{domain}") for domain in grid.domains}
    known = {domain: cost.value for domain, cost in costs.items() if cost}
    worst = max(known, key=lambda domain: known[domain])
    harm = f"{worst} (KL {rough(known[worst])} nats per token)"
    return f"with {percent(ratio)} of the experts pruned its worst domain is {harm}"


def _best_accuracies(grid: Grid, ranks: Standings) -> list[str]:
    words = []
    for task in grid.tasks:
        known = {s.method: a for s in ranks.methods if (a := s.accuracies[task])}
        if known:
            top = max(known, key=lambda name: known[name].measure.value)
            level = sum(score.level for score in known.values())
            others = f", not clearly above {level} other{'s' if level > 1 else ''}" if level else ""
            words.append(f"{task} accuracy is highest with {top} ({share(known[top].measure.value)}{others})")
    return words


def first_numbers(grid: Grid, ranks: Standings | None) -> list[str]:
    """The few numbers a reader looks for first: `name: **value** (meaning)`."""
    methods = f" ({', '.join(grid.methods)})" if grid.methods else ""
    facts = [f"runs done: **{len(grid.done)} of {len(grid.runs)}**", f"methods: **{len(grid.methods)}**{methods}"]
    if ranks:
        first = ranks.methods[0]
        facts.append(f"best mean rank by KL: **{first.method}** ({first.rank.measure} of {len(ranks.methods)})")
        least = min(ranks.methods, key=lambda standing: standing.relative_worst.measure.value)
        cost = f"×{least.relative_worst.measure} of the best"
        facts.append(f"lowest KL on the worst domain: **{least.method}** ({cost})")
    return facts
