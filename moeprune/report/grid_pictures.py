"""Figures of a grid's report; None where the grid does not hold what a figure needs."""

from typing import TYPE_CHECKING, Any

from moeprune.report import draw_grid
from moeprune.report.draw_grid import Point
from moeprune.report.grid_record import Grid, group_label
from moeprune.report.page import Picture
from moeprune.report.ranks import OBJECTIVES, Prediction, agreement, damage_of, repeated
from moeprune.report.run_record import Measure, measure
from moeprune.report.style import Theme, listed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS = 60  # of the heat map


def curves(grid: Grid) -> dict[str, Picture | None]:
    """Setting -> quality against the pruned share, a line per method; few settings share one figure, named "".

    Empty when all runs prune the same share; None when no quality was measured.
    """
    groups = grid.groups()
    if len({ratio for _, _, ratio in groups}) < 2:
        return {}
    settings = list(dict.fromkeys(setting for _, setting, _ in groups))
    if len(settings) == 1 or len(settings) > len(draw_grid.DASHES):
        return {s: _curves_of(grid, [s], f"curves-{i}" if i else "curves") for i, s in enumerate(settings)}
    return {"": _curves_of(grid, settings, "curves")}


def _curves_of(grid: Grid, settings: list[str], stem: str) -> Picture | None:
    names = {f"KL, {domain}": f"fidelity/kl/{domain}" for domain in grid.domains}
    names |= {f"{task} accuracy": f"task/accuracy/{task}" for task in grid.tasks}
    panels: dict[str, dict[tuple[str, str], dict[float, Measure]]] = {}
    for title, name in names.items():
        for (method, setting, ratio), members in grid.groups().items():
            value = repeated(members, name) if setting in settings else None
            if value is not None:
                panels.setdefault(title, {}).setdefault((method, setting), {})[ratio] = value
    if not panels:
        return None
    logs = {name: name.startswith("KL") for name in panels}
    alt = f"Lines of {listed(panels)} against the share of pruned experts for {listed(grid.methods)}"
    return Picture(stem, lambda theme: draw_grid.curves(panels, grid.methods, theme, logarithmic=logs), alt)


def kl_rows(grid: Grid) -> dict[tuple[str, str, float], dict[str, float]]:
    """(method, setting, ratio) -> domain -> mean KL, by setting and ratio."""
    rows = {}
    for group, members in sorted(grid.groups().items(), key=lambda item: (item[0][1], item[0][2])):
        values = {domain: repeated(members, f"fidelity/kl/{domain}") for domain in grid.domains}
        known = {domain: value.value for domain, value in values.items() if value}
        if known and max(known.values()) > 0:
            rows[group] = known
    return rows


def worst_domains(grid: Grid, rows: dict[tuple[str, str, float], dict[str, float]]) -> Picture | None:
    """KL of every method and ratio on every domain."""
    if not rows:
        return None
    groups = list(rows)[:ROWS]
    breaks = [i for i in range(1, len(groups)) if groups[i][1:] != groups[i - 1][1:]]
    shown = {group_label(group): rows[group] for group in groups}

    def draw(theme: Theme) -> "Figure":
        return draw_grid.heat_map(shown, grid.domains, theme, breaks=breaks)

    return Picture("worst-domains", draw, "Heat map of KL by method, ratio and domain")


def sets(grid: Grid) -> Picture | None:
    """How much the methods' kept sets have in common."""
    if len(grid.methods) < 2:
        return None
    table, methods = agreement(grid), list(grid.methods)
    alt = "Matrix of Jaccard indices between methods"
    return Picture("agreement", lambda theme: draw_grid.agreement_matrix(table, methods, theme), alt)


def objectives(grid: Grid, costs: list[Prediction]) -> Picture | None:
    """Whether a set's cost predicts the damage."""
    panels = {
        words: [Point(run.method, cost, Measure(run.damage)) for run in costs if (cost := run.costs[words]) is not None]
        for words in OBJECTIVES
    }
    panels = {words: points for words, points in panels.items() if points}
    if not panels:
        return None
    look: dict[str, Any] = {
        "ylabels": dict.fromkeys(panels, "KL (nats per token)"),
        "logarithmic_y": dict.fromkeys(panels, True),
        "xlabel": "cost of the pruned set / cost of pruning all",
        "xscale": "log" if all(point.x > 0 for points in panels.values() for point in points) else "linear",
    }
    alt = "Scatter of cost against KL for every run"
    return Picture("objectives", lambda theme: draw_grid.scatter(panels, grid.methods, theme, **look), alt)


def sizes(grid: Grid) -> Picture | None:
    """Size and memory against quality."""
    panels: dict[str, list[Point]] = {}
    base: dict[str, Point] = {}
    largest = max((run.metrics.get("size/bytes/base", 0.0) for run in grid.done), default=0.0)
    unit, scale = ("GB", 1e9) if largest >= 1e9 else ("MB", 1e6)
    middle, step = (len(grid.methods) - 1) / 2, 0.008 * largest / scale
    shifts = {method: step * (number - middle) for number, method in enumerate(grid.methods)}
    for name, words in {"size/bytes": "weights on disk", "speed/peak_memory": "peak memory"}.items():
        for run in grid.done:
            size, damage = measure(run.metrics, name), damage_of(run)
            if size is None:
                continue
            method = grid.names[run.name]
            x = size.value / scale + shifts[method]
            if damage is not None:
                panels.setdefault(f"KL against {words}", []).append(Point(method, x, Measure(damage)))
            for task in grid.tasks:
                accuracy = measure(run.metrics, f"task/accuracy/{task}")
                if accuracy is None:
                    continue
                panel = f"{task} accuracy against {words}"
                panels.setdefault(panel, []).append(Point(method, x, accuracy))
                if accuracy.base is not None and size.base is not None:
                    base[panel] = Point("", size.base / scale, Measure(accuracy.base))
    if not panels:
        return None
    logs = {panel: panel.startswith("KL") for panel in panels}
    ylabels = {panel: "KL (nats per token)" if logs[panel] else "accuracy" for panel in panels}
    look: dict[str, Any] = {"xlabel": f"size ({unit})", "ylabels": ylabels, "logarithmic_y": logs, "base": base}
    alt = "Scatter of model size against quality"
    return Picture("sizes", lambda theme: draw_grid.scatter(panels, grid.methods, theme, **look), alt)
