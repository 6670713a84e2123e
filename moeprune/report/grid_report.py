"""Figures of a grid's report, with their captions; a sentence where the grid does not hold what a figure needs.

The report of a grid: report.html (self-contained), report.md with figures/*.png, report.csv.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import write_text
from moeprune.report import draw_grid as figures
from moeprune.report import grid_tables
from moeprune.report.grid_record import Grid, group_label, read_grid, read_runs
from moeprune.report.page import Paragraph, Part, Picture, Report, Section, Tiles
from moeprune.report.ranks import (
    FEW,
    Prediction,
    Standings,
    agreement,
    damage_of,
    predictions,
    repeated,
    spearman,
    standings,
)
from moeprune.report.run_record import Measure, measure
from moeprune.report.run_report import save_report
from moeprune.report.style import Theme, listed, percent, rough, share

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS = 60  # of the heat map


def curves(grid: Grid) -> Section:
    """Quality against the pruned share, a line per method; few settings share a figure, many get one each."""
    title = "Fidelity against ratio"
    groups = grid.groups()
    if len({ratio for _, _, ratio in groups}) < 2:
        return Section(title, [Paragraph("All runs prune the same share, so there is no curve to draw.")])
    settings = list(dict.fromkeys(setting for _, setting, _ in groups))
    together = [settings] if len(settings) <= len(figures.DASHES) else [[setting] for setting in settings]
    parts = [_curves_of(grid, chosen, f"curves-{i}" if i else "curves") for i, chosen in enumerate(together)]
    return Section(title, parts)


def _curves_of(grid: Grid, settings: list[str], stem: str) -> Part:
    names = {f"KL, {domain}": f"fidelity/kl/{domain}" for domain in grid.domains}
    names |= {f"{task} accuracy": f"task/accuracy/{task}" for task in grid.tasks}
    panels: dict[str, dict[tuple[str, str], dict[float, Measure]]] = {}
    for title, name in names.items():
        for (method, setting, ratio), members in grid.groups().items():
            value = repeated(members, name) if setting in settings else None
            if value is not None:
                panels.setdefault(title, {}).setdefault((method, setting), {})[ratio] = value
    if not panels:
        return Paragraph("No quality was measured.")
    logs = {name: name.startswith("KL") for name in panels}
    only = f" Setting: {settings[0]}." if len(settings) == 1 and settings[0] else ""
    caption = (
        "**Quality against the share of pruned experts.** KL in nats per token (logarithmic, lower is better), task "
        "accuracy (higher is better). Marks are means over repeated runs with their range; whiskers of single runs are "
        f"95 % intervals. Methods are set apart a little so that whiskers do not hide each other.{only}"
    )
    alt = f"Lines of {listed(panels)} against the share of pruned experts for {listed(grid.methods)}"

    def draw(theme: Theme) -> "Figure":
        return figures.curves(panels, grid.methods, theme, logarithmic=logs)

    return Picture(stem, draw, alt, caption)


def worst_domains(grid: Grid) -> Section:
    """KL of every method and ratio on every domain."""
    title = "Worst domains"
    rows: dict[str, dict[str, float]] = {}
    ratios: list[tuple[str, float]] = []  # setting and ratio of every row
    for group, members in sorted(grid.groups().items(), key=lambda item: (item[0][1], item[0][2])):
        values = {domain: repeated(members, f"fidelity/kl/{domain}") for domain in grid.domains}
        known = {domain: value.value for domain, value in values.items() if value}
        if known and max(known.values()) > 0:
            rows[group_label(group)] = known
            ratios.append(group[1:])
    if not rows:
        return Section(title, [Paragraph("No KL was measured.")])
    shown = dict(list(rows.items())[:ROWS])
    breaks = [i for i in range(1, len(shown)) if ratios[i] != ratios[i - 1]]
    cut = f" The first {ROWS} of {len(rows)} rows are shown; the csv has all." if len(rows) > ROWS else ""
    caption = f"**KL on every domain**, means over repeated runs; the frame marks the worst domain of each row.{cut}"

    def draw(theme: Theme) -> "Figure":
        return figures.heat_map(shown, grid.domains, theme, breaks=breaks)

    return Section(title, [Picture("worst-domains", draw, "Heat map of KL by method, ratio and domain", caption)])


def sets(grid: Grid) -> Section:
    """How much the methods' kept sets have in common."""
    title = "Agreement of sets"
    if len(grid.methods) < 2:
        return Section(title, [Paragraph("One method alone: there is nothing to compare.")])
    table, methods = agreement(grid), list(grid.methods)
    caption = (
        "**Jaccard index of kept sets**, mean over layers and over the conditions that both methods were run under. On "
        "the diagonal: runs of a method that repeat a condition, 1 where there is one."
    )

    def draw(theme: Theme) -> "Figure":
        return figures.agreement_matrix(table, methods, theme)

    return Section(title, [Picture("agreement", draw, "Matrix of Jaccard indices between methods", caption)])


def objectives(grid: Grid) -> Section:
    """Whether a set's cost predicts the damage."""
    title = "Does the objective predict the damage?"
    found = predictions(grid)
    panels: dict[str, list[figures.Point]] = {}
    sentences = []
    for words, attribute in (("HOPE's objective, for every set", "ruler"), ("each method's own objective", "own")):
        known = [(getattr(p, attribute), p) for p in found if getattr(p, attribute) is not None]
        if not known:
            continue
        rho = spearman([x for x, _ in known], [p.damage for _, p in known])
        panels[words] = [figures.Point(p.method, x, Measure(p.damage)) for x, p in known]
        if rho is not None:
            sentences.append(f"{words}: Spearman ρ = {rho:.2f} over {len(known)} runs{_inside(known)}")
    if not panels:
        return Section(title, [Paragraph("The statistics that the plans came from are not at hand.")])
    caption = (
        "**Cost against damage**, a mark per run. Cost: of the pruned set, as a share of pruning every expert, mean "
        "over layers. Damage: KL in nats per token, mean over the evaluated domains that calibration saw (over all, "
        "where it saw none)."
    )
    look: dict[str, Any] = {
        "ylabels": dict.fromkeys(panels, "KL (nats per token)"),
        "logarithmic_y": dict.fromkeys(panels, True),
        "xlabel": "cost of the pruned set / cost of pruning all",
        "xscale": "log" if all(point.x > 0 for points in panels.values() for point in points) else "linear",
    }

    def draw(theme: Theme) -> "Figure":
        return figures.scatter(panels, grid.methods, theme, **look)

    parts: list[Part] = [Paragraph("; ".join(sentences) + ".")] if sentences else []
    return Section(title, [*parts, Picture("objectives", draw, "Scatter of cost against KL for every run", caption)])


def _inside(known: list[tuple[float, Prediction]]) -> str:
    """The mean correlation among runs of one ratio: across ratios almost anything correlates."""
    found = []
    for ratio in {round(p.ratio, 6) for _, p in known}:
        same = [(x, p.damage) for x, p in known if round(p.ratio, 6) == ratio]
        rho = spearman([x for x, _ in same], [y for _, y in same])
        if rho is not None:
            found.append(rho)
    return f" (among runs of one ratio {sum(found) / len(found):.2f} on average)" if found else ""


def sizes(grid: Grid) -> Section:
    """Size and memory against quality."""
    title = "Size against quality"
    panels: dict[str, list[figures.Point]] = {}
    base: dict[str, figures.Point] = {}
    largest = max((run.metrics.get("size/bytes/base", 0.0) for run in grid.done), default=0.0)
    unit, scale = ("GB", 1e9) if largest >= 1e9 else ("MB", 1e6)
    middle, step = (len(grid.methods) - 1) / 2, 0.008 * largest / scale
    apart = {method: step * (number - middle) for number, method in enumerate(grid.methods)}
    for name, words in {"size/bytes": "weights on disk", "speed/peak_memory": "peak memory"}.items():
        for run in grid.done:
            size, damage = measure(run.metrics, name), damage_of(run)
            if size is None:
                continue
            method = grid.names[run.name]
            x = size.value / scale + apart[method]
            if damage is not None:
                panels.setdefault(f"KL against {words}", []).append(figures.Point(method, x, Measure(damage)))
            for task in grid.tasks:
                accuracy = measure(run.metrics, f"task/accuracy/{task}")
                if accuracy is None:
                    continue
                panel = f"{task} accuracy against {words}"
                panels.setdefault(panel, []).append(figures.Point(method, x, accuracy))
                if accuracy.base is not None and size.base is not None:
                    base[panel] = figures.Point("", size.base / scale, Measure(accuracy.base))
    if not panels:
        return Section(title, [Paragraph("No size was measured.")])
    logs = {panel: panel.startswith("KL") for panel in panels}
    ylabels = {panel: "KL (nats per token)" if logs[panel] else "accuracy" for panel in panels}
    caption = (
        "**Size against quality**, a mark per run; KL as above, accuracy with its 95 % interval. The star is the "
        "unpruned model. Lower left (KL) and upper left (accuracy) are better. Methods are set apart a little."
    )
    look: dict[str, Any] = {"xlabel": f"size ({unit})", "ylabels": ylabels, "logarithmic_y": logs, "base": base}

    def draw(theme: Theme) -> "Figure":
        return figures.scatter(panels, grid.methods, theme, **look)

    return Section(title, [Picture("sizes", draw, "Scatter of model size against quality", caption)])


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
        curves(grid),
        grid_tables.by_ratio(grid),
        worst_domains(grid),
        sets(grid),
        objectives(grid),
        sizes(grid),
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
