"""Figures of a grid. Each function takes plain data and a theme and returns a matplotlib figure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from moeprune.report.draw_run import columns_of
from moeprune.report.run_record import Measure
from moeprune.report.style import WIDTH, MethodStyle, Theme, rough

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import XAxis, YAxis
    from matplotlib.figure import Figure

DASHES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)))


@dataclass(frozen=True)
class Point:
    """One mark of a scatter plot."""

    method: str
    x: float
    y: Measure


def curves(
    panels: Mapping[str, Mapping[tuple[str, str], Mapping[float, Measure]]],
    styles: Mapping[str, MethodStyle],
    theme: Theme,
    *,
    logarithmic: Mapping[str, bool],
) -> "Figure":
    """Quality against the share of pruned experts: a panel per measure, a line per method and setting.

    panels: title -> (method, setting) -> share -> measure. Settings differ in the dash of the line.
    """
    from matplotlib.figure import Figure

    columns = columns_of(len(panels), widest=3)
    rows = math.ceil(len(panels) / columns)
    settings = list(dict.fromkeys(setting for lines in panels.values() for _, setting in lines))
    handles = _handles(styles, settings, theme)
    figure = Figure(figsize=(WIDTH, rows * 2.25 + 0.6 + 0.2 * _legend_rows(handles)), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, (title, lines) in zip(grid.flat, panels.items()):
        spread = _spread(lines)
        for number, ((method, setting), points) in enumerate(lines.items()):
            shift = spread * (number - (len(lines) - 1) / 2)
            _line(axes, points, styles[method], DASHES[settings.index(setting) % len(DASHES)], theme, shift)
        axes.set_title(title, loc="left")
        if logarithmic[title]:
            axes.set_yscale("log")
            _plain_log(axes.yaxis, *axes.get_ylim())
        else:
            axes.set_ylim(-0.03, 1.03)
        shares = sorted({share for points in lines.values() for share in points})
        axes.set_xticks(shares, [f"{100 * share:.3g} %" for share in shares])
        axes.grid(True)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    figure.supxlabel("experts pruned", fontsize=9)
    figure.legend(handles=handles, loc="outside upper left", ncols=_legend_columns(handles))
    return figure


def _spread(lines: Mapping[Any, Mapping[float, Measure]]) -> float:
    """A small shift between methods, so that whiskers at the same share do not hide each other."""
    shares = sorted({share for points in lines.values() for share in points})
    gaps = np.diff(shares)
    return float(0.18 * gaps.min() / max(len(lines), 1)) if len(gaps) else 0.01


def _line(
    axes: "Axes", points: Mapping[float, Measure], style: MethodStyle, dash: Any, theme: Theme, shift: float
) -> None:
    shares = sorted(points)
    values = np.array([points[share].value for share in shares])
    lows, highs = (
        np.array([v if (end := getattr(points[s], name)) is None else end for s, v in zip(shares, values)])
        for name in ("low", "high")
    )
    axes.errorbar(
        np.array(shares) + shift,
        values,
        yerr=[np.maximum(values - lows, 0), np.maximum(highs - values, 0)],
        color=style.color,
        linestyle=dash,
        marker=style.marker,
        markersize=5.5,
        markeredgecolor=theme.paper,
        markeredgewidth=0.6,
        linewidth=1.4,
        elinewidth=0.9,
        capsize=1.5,
    )


def heat_map(
    rows: Mapping[str, Mapping[str, float]], domains: Sequence[str], theme: Theme, *, breaks: Sequence[int] = ()
) -> "Figure":
    """KL of every row (method, ratio, setting) on every domain, in a logarithmic scale, the worst domain framed.

    breaks: numbers of the rows that a gap stands before.
    """
    import matplotlib as mpl
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    values = np.array([[row.get(domain, np.nan) for domain in domains] for row in rows.values()])
    floor = float(np.nanmin(np.where(values > 0, values, np.nan)))
    values = np.where(np.isnan(values), np.nan, np.maximum(values, floor))
    norm = LogNorm(floor, max(float(np.nanmax(values)), floor * 1.01))
    colors = mpl.colormaps["cividis"].with_extremes(bad=theme.paper)
    figure = Figure(figsize=(WIDTH, 0.24 * len(rows) + 1.25), layout="constrained")
    axes = figure.subplots()
    drawn = axes.imshow(np.ma.masked_invalid(values), norm=norm, cmap=colors, aspect="auto")
    size = 8.5 if len(rows) <= 40 else 6.5
    for y, x in np.ndindex(*values.shape):
        if np.isfinite(values[y, x]):
            dark = float(norm(values[y, x])) < 0.55
            axes.text(
                x, y, rough(float(values[y, x])), ha="center", va="center", fontsize=size, color="w" if dark else "k"
            )
    for y, row in enumerate(values):
        if np.isfinite(row).any():
            worst = int(np.nanargmax(row))
            frame: dict[str, Any] = {"fill": False, "edgecolor": "#D55E00", "linewidth": 2.0}
            axes.add_patch(Rectangle((worst - 0.47, y - 0.44), 0.94, 0.88, **frame))
    for y in breaks:
        axes.axhline(y - 0.5, color=theme.paper, linewidth=4, zorder=0.5)
    axes.set_xticks(range(len(domains)), domains)
    axes.xaxis.tick_top()
    axes.set_yticks(range(len(rows)), list(rows), fontsize=size)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(drawn, ax=axes, location="bottom", shrink=0.5, aspect=40, pad=0.01, format="%g")
    bar.set_label("KL to the unpruned model (nats per token)")
    bar.outline.set_visible(False)
    return figure


def agreement_matrix(table: np.ndarray, methods: Sequence[str], theme: Theme) -> "Figure":
    """Mean Jaccard index of the kept sets of every two methods."""
    import matplotlib as mpl
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    names = 0.075 * max(map(len, methods))  # inches that a label takes
    side = min(0.55 * len(methods), WIDTH - names - 1)
    figure = Figure(figsize=(side + names + 1, side + 0.6 * names + 0.3), layout="constrained")
    axes = figure.subplots()
    colors = mpl.colormaps["cividis"].with_extremes(bad=theme.paper)
    low = math.floor(10 * float(np.nanmin(table))) / 10
    norm = Normalize(min(low, 0.9), 1)
    drawn = axes.imshow(np.ma.masked_invalid(table), norm=norm, cmap=colors)
    for y, x in np.ndindex(*table.shape):
        if np.isfinite(table[y, x]):
            light = float(norm(table[y, x])) > 0.55
            axes.text(x, y, f"{table[y, x]:.2f}", ha="center", va="center", fontsize=8.5, color="k" if light else "w")
    axes.set_xticks(range(len(methods)), methods, rotation=35, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(methods)), methods)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(drawn, ax=axes, shrink=0.8)
    bar.set_label("Jaccard index of kept sets")
    bar.outline.set_visible(False)
    return figure


def scatter(
    panels: Mapping[str, Sequence[Point]],
    styles: Mapping[str, MethodStyle],
    theme: Theme,
    *,
    xlabel: str,
    ylabels: Mapping[str, str],
    logarithmic_y: Mapping[str, bool],
    xscale: Literal["linear", "log"] = "linear",
    base: Mapping[str, Point] | None = None,
) -> "Figure":
    """A panel per title; a mark per run with its interval, the unpruned model as a star where it is given."""
    from matplotlib.figure import Figure

    columns = columns_of(len(panels), widest=2)
    rows = math.ceil(len(panels) / columns)
    handles = _handles(styles, [], theme)
    if base:
        handles.append(_handle("unpruned", MethodStyle(theme.ink, "*"), theme, linestyle="", size=11))
    height = rows * 2.7 + 0.5 + 0.2 * _legend_rows(handles)
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, (title, points) in zip(grid.flat, panels.items()):
        for point in points:
            _mark(axes, point, styles[point.method], theme)
        origin = (base or {}).get(title)
        if origin:
            axes.plot(origin.x, origin.y.value, "*", color=theme.ink, markersize=12, linestyle="", zorder=5)
        axes.set_title(title, loc="left")
        axes.set_ylabel(ylabels[title])
        if xscale == "log":
            axes.set_xscale("log")
            _plain_log(axes.xaxis, *axes.get_xlim())
        if logarithmic_y[title]:
            axes.set_yscale("log")
            _plain_log(axes.yaxis, *axes.get_ylim())
        axes.grid(True)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    figure.supxlabel(xlabel, fontsize=9)
    figure.legend(handles=handles, loc="outside upper left", ncols=_legend_columns(handles))
    return figure


def _mark(axes: "Axes", point: Point, style: MethodStyle, theme: Theme) -> None:
    value, low, high = point.y.value, point.y.low, point.y.high
    error = None if low is None or high is None else [[max(value - low, 0)], [max(high - value, 0)]]
    look: dict[str, Any] = {
        "markersize": 6,
        "markeredgecolor": theme.paper,
        "markeredgewidth": 0.6,
        "elinewidth": 0.9,
        "alpha": 0.9,
    }
    axes.errorbar(point.x, value, yerr=error, color=style.color, marker=style.marker, linestyle="", **look)


def _handles(styles: Mapping[str, MethodStyle], settings: Sequence[str], theme: Theme) -> list[Any]:
    handles = [_handle(name, style, theme, linestyle="-" if settings else "") for name, style in styles.items()]
    if len(settings) > 1:
        from matplotlib.lines import Line2D

        for number, setting in enumerate(settings):
            dash = DASHES[number % len(DASHES)]
            handles.append(
                Line2D([], [], color=theme.ink, linestyle=dash, linewidth=1.4, label=setting or "as in base")
            )
    return handles


def _handle(name: str, style: MethodStyle, theme: Theme, *, linestyle: Any, size: float = 6.5) -> Any:
    from matplotlib.lines import Line2D

    return Line2D(
        [],
        [],
        color=style.color,
        marker=style.marker,
        markersize=size,
        markeredgecolor=theme.paper,
        markeredgewidth=0.6,
        linestyle=linestyle,
        linewidth=1.4,
        label=name,
    )


def _legend_columns(handles: Sequence[Any]) -> int:
    """As many columns as the labels leave room for; matplotlib fills them one after the other, evenly."""
    lengths = [len(handle.get_label()) for handle in handles]
    for columns in range(min(5, len(lengths)), 1, -1):
        widest = [int(column.max()) for column in np.array_split(lengths, columns)]
        if sum(0.07 * length + 0.55 for length in widest) <= WIDTH:
            return columns
    return 1


def _legend_rows(handles: Sequence[Any]) -> int:
    return math.ceil(len(handles) / _legend_columns(handles))


def _plain_log(axis: "XAxis | YAxis", low: float, high: float) -> None:
    """Log ticks as plain numbers (0.1, 0.3, 1), as many as there is room for."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    decades = math.log10(high / low)
    steps = (1.0, 2.0, 5.0) if decades < 1.2 else (1.0, 3.0) if decades < 2.6 else (1.0,)
    axis.set_major_locator(LogLocator(10, subs=steps, numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
