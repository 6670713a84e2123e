"""Figures of one run. Each function takes plain data and a theme and returns a matplotlib figure."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from moeprune.artifacts.plan import LayerPlan
from moeprune.artifacts.statistics import LayerStatistics
from moeprune.report.run_record import Measure
from moeprune.report.style import WIDTH, MethodStyle, Theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = 12  # layers that get a scatter plot of their own; more are pooled


def short_name(layer: str) -> str:
    """`model.layers.3.mlp` -> `layer 3`; a name without a number stays."""
    numbers = re.findall(r"\.(\d+)(?=\.|$)", layer)
    return f"layer {numbers[0]}" if numbers else layer


def kept_map(plans: Sequence[LayerPlan], dead: Mapping[str, Sequence[int]], theme: Theme) -> "Figure":
    """Which experts stay in every layer: one row a layer, one cell an expert in the original numbering."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    widest = max(plan.num_experts for plan in plans)
    cells = np.full((len(plans), widest), np.nan)
    for row, plan in enumerate(plans):
        cells[row, : plan.num_experts] = 0
        cells[row, list(plan.kept)] = 1
    row_height = float(np.clip(6.0 / len(plans), 0.13, 0.26))
    figure = Figure(figsize=(WIDTH, len(plans) * row_height + 0.95), layout="constrained")
    axes = figure.subplots()
    axes.pcolormesh(
        np.arange(widest + 1) - 0.5,
        np.arange(len(plans) + 1) - 0.5,
        np.ma.masked_invalid(cells),
        cmap=ListedColormap([theme.pruned, theme.kept]),
        vmin=0,
        vmax=1,
        edgecolors=theme.paper,
        linewidth=1.2 if widest <= 64 else 0.3,
    )
    marks = [(expert, row) for row, plan in enumerate(plans) for expert in dead.get(plan.name, ())]
    if marks:
        experts, rows = zip(*marks)
        axes.scatter(experts, rows, marker="x", s=22 if widest <= 64 else 8, color=theme.ink, linewidths=1.4)
    axes.invert_yaxis()
    axes.set_yticks(range(len(plans)), [short_name(plan.name) for plan in plans], fontsize=min(8.5, 60 * row_height))
    axes.set_xticks(range(0, widest, _tick_step(widest)))
    axes.set_xlabel("expert (id in the unpruned model)")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    right = axes.secondary_yaxis("right")
    counts = [f"{len(plan.kept)} / {plan.num_experts}" for plan in plans]
    right.set_yticks(range(len(plans)), counts, fontsize=min(8.5, 60 * row_height))
    right.tick_params(length=0)
    right.spines[:].set_visible(False)
    handles: list[Any] = [Patch(color=theme.kept, label="kept"), Patch(color=theme.pruned, label="pruned")]
    if marks:
        handles.append(Line2D([], [], marker="x", color=theme.ink, ls="", label="never routed in calibration"))
    figure.legend(handles=handles, loc="outside upper right", ncols=3)
    return figure


def frequency_figure(statistics: Mapping[str, LayerStatistics], plans: Sequence[LayerPlan], theme: Theme) -> "Figure":
    """Routing frequency against saliency of every expert, kept and pruned told apart by shape and colour.

    Saliency is the mean gated output norm of an expert's own tokens (REAP's score), sum g n / N.
    """
    from matplotlib.figure import Figure

    pooled = len(plans) > PANELS
    panels = [list(plans)] if pooled else [[plan] for plan in plans]
    columns = 1 if pooled else columns_of(len(panels), widest=4)
    rows = math.ceil(len(panels) / columns)
    height = 3.6 if pooled else rows * (WIDTH / columns * (0.55 if columns == 1 else 1.05)) + 0.55
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, panel in zip(grid.flat, panels):
        _frequency_panel(axes, panel, statistics, theme, relative=pooled)
        if not pooled:
            axes.set_title(short_name(panel[0].name), loc="left")
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    figure.supxlabel(f"tokens routed to the expert{', relative to even routing' if pooled else ' (%)'}", fontsize=9)
    figure.supylabel("saliency / layer mean" if pooled else "mean gated output norm", fontsize=9)
    figure.legend(handles=grid[0, 0].get_legend_handles_labels()[0], loc="outside upper right", ncols=3)
    return figure


def _frequency_panel(
    axes: "Axes",
    plans: Sequence[LayerPlan],
    statistics: Mapping[str, LayerStatistics],
    theme: Theme,
    *,
    relative: bool,
) -> None:
    """Scatter of one layer, or of many with both axes divided by the layer's mean."""
    points: dict[str, list[np.ndarray]] = {"kept": [], "pruned": []}
    for plan in plans:
        sums = statistics[plan.name]
        count = np.asarray(sums.count, dtype=np.float64)
        share = 100 * count / float(sums.tokens)
        saliency = np.divide(sums.gated_norm_sum, count, out=np.zeros(len(count)), where=count > 0)
        if relative:
            share, saliency = share / share.mean(), saliency / saliency.mean()
        is_kept = np.isin(np.arange(plan.num_experts), plan.kept)
        points["kept"].append(np.stack([share, saliency])[:, is_kept])
        points["pruned"].append(np.stack([share, saliency])[:, ~is_kept])
    size, line = (10, 0.7) if relative else (26, 1.4)
    looks: dict[str, dict[str, Any]] = {
        "kept": {"marker": "o", "color": theme.kept, "edgecolors": theme.paper, "linewidths": 0.5, "zorder": 3},
        "pruned": {"marker": "^", "facecolors": "none", "edgecolors": theme.pruned, "linewidths": line, "zorder": 2},
    }
    for name, parts in points.items():
        x, y = np.concatenate(parts, axis=1)
        axes.scatter(x, y, s=size, label=name, alpha=0.75 if relative else 1.0, clip_on=False, **looks[name])
    if not relative:
        even = 100 * plans[0].top_k / plans[0].num_experts
        axes.axvline(even, color=theme.ink, linewidth=0.8, linestyle=(0, (2, 3)), label="even routing", zorder=1)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(_few_ticks())
    axes.yaxis.set_major_locator(_few_ticks())
    axes.grid(True)


def kl_bars(
    domains: Mapping[str, Mapping[str, Measure]],
    styles: Mapping[str, MethodStyle],
    theme: Theme,
    *,
    notes: Mapping[str, str],
) -> "Figure":
    """KL(unpruned || pruned) of every method, a panel per domain, with intervals; each panel has its own scale.

    domains: domain -> method -> KL, worst domain first; notes: domain -> words beside its name.
    """
    from matplotlib.figure import Figure

    methods = list(styles)
    columns = min(2, len(domains))
    rows = math.ceil(len(domains) / columns)
    figure = Figure(figsize=(WIDTH, rows * (0.29 * len(methods) + 0.62) + 0.35), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for axes, (domain, bars) in zip(grid.flat, domains.items()):
        _bar_panel(axes, [bars.get(method) for method in methods], [styles[m] for m in methods], theme)
        note = notes.get(domain, "")
        axes.set_title(domain + (f"  ({note})" if note else ""), loc="left")
        axes.set_yticks(range(len(methods)), methods)
    grid[0, 0].invert_yaxis()
    for axes in grid.flat[len(domains) :]:
        axes.set_visible(False)
    figure.supxlabel("KL to the unpruned model (nats per token); each panel has its own scale", fontsize=9)
    return figure


def _bar_panel(axes: "Axes", bars: Sequence[Measure | None], styles: Sequence[MethodStyle], theme: Theme) -> None:
    from matplotlib.patches import Rectangle

    reach = _reach([bar.value if bar.high is None else bar.high for bar in bars if bar])
    for row, (bar, style) in enumerate(zip(bars, styles)):
        if bar is None:
            axes.text(0, row, " not measured", va="center", fontsize=8, style="italic")
            continue
        axes.barh(row, bar.value, height=0.62, color=style.color, hatch=style.hatch)
        end = bar.value
        if bar.low is not None and bar.high is not None:
            error = [[max(0.0, bar.value - bar.low)], [max(0.0, bar.high - bar.value)]]
            axes.errorbar(bar.value, row, xerr=error, color=theme.ink, capsize=2.5, linewidth=1.1)
            end = max(bar.high, bar.value)
        if end > reach:
            end = reach
            axes.add_patch(Rectangle((reach, row - 0.5), reach, 1, facecolor=theme.paper, zorder=4))
            axes.text(reach, row, "//", color=theme.paper, ha="right", va="center", weight="bold", zorder=5)
        axes.text(end + 0.02 * reach, row, f" {bar}", va="center", fontsize=8, zorder=5)
    axes.set_xlim(0, 1.75 * reach)  # room for the numbers
    axes.xaxis.set_major_locator(_few_ticks())
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _reach(ends: Sequence[float]) -> float:
    """Where a panel's bars end: one five times longer than all others is broken off, so that these stay legible."""
    longest = max([*ends, 1e-12])
    second = sorted(ends)[-2] if len(ends) > 2 else longest
    return 2 * second if 0 < 5 * second < longest else longest


def _few_ticks() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(4)


def columns_of(panels: int, *, widest: int) -> int:
    """Columns of a panel grid: all in one row if they fit, else as even rows as possible."""
    rows = math.ceil(panels / widest)
    return math.ceil(panels / rows)


def _tick_step(count: int) -> int:
    return next((step for step in (1, 2, 4, 8, 16, 32, 64) if count / step <= 17), 128)


def cluster_order(matrix: np.ndarray) -> np.ndarray:
    """Expert ids (experts,) so that experts that fire together stand together; experts with an empty row come last.

    Average-linkage clustering of the cosine F_ij / sqrt(F_ii F_jj); leaves in the optimal order up to 64 experts,
    beyond which that order costs seconds a layer.
    """
    from scipy.cluster.hierarchy import leaves_list, linkage, optimal_leaf_ordering
    from scipy.spatial.distance import squareform

    diagonal = np.diagonal(matrix)
    alive = np.flatnonzero(diagonal > 0)
    dead = np.flatnonzero(~(diagonal > 0))
    if len(alive) < 3:
        return np.concatenate([alive, dead])
    scale = np.sqrt(diagonal[alive])
    cosine = matrix[np.ix_(alive, alive)] / np.outer(scale, scale)
    distance = squareform(np.clip(1 - cosine, 0, None) * (1 - np.eye(len(alive))), checks=False)
    tree = linkage(distance, "average")
    if len(alive) <= 64:
        tree = optimal_leaf_ordering(tree, distance)
    return np.concatenate([alive[leaves_list(tree)], dead])


def interaction_figure(
    matrices: Mapping[str, np.ndarray],
    orders: Mapping[str, np.ndarray],
    plans: Sequence[LayerPlan],
    theme: Theme,
    *,
    unit: str,
) -> "Figure":
    """F of every layer as a heat map, rows and columns in the given order, pruned experts marked along both edges."""
    import matplotlib as mpl
    from matplotlib.colors import PowerNorm, SymLogNorm
    from matplotlib.figure import Figure

    columns = columns_of(len(plans), widest=6)
    rows = math.ceil(len(plans) / columns)
    size = WIDTH / columns
    figure = Figure(figsize=(WIDTH, rows * (size + 0.08) + 0.85), layout="compressed")
    grid = figure.subplots(rows, columns, squeeze=False)
    signed = any((matrices[plan.name] < 0).any() for plan in plans)
    # Entries span decades below the diagonal: the square root keeps pairs visible, a linear scale shows a black field.
    norm: Any = SymLogNorm(0.1, vmin=-1, vmax=1) if signed else PowerNorm(0.5, vmin=0, vmax=1)
    colors = mpl.colormaps["PuOr" if signed else "viridis"]
    for axes, plan in zip(grid.flat, plans):
        _heat_map(axes, matrices[plan.name], orders[plan.name], plan, theme, norm, colors)
        axes.set_title(short_name(plan.name), loc="left", pad=4)
    for axes in grid.flat[len(plans) :]:
        axes.set_visible(False)
    scalar = mpl.cm.ScalarMappable(norm=norm, cmap=colors)
    ticks = [-1, -0.3, -0.1, 0, 0.1, 0.3, 1] if signed else [0, 0.01, 0.1, 0.25, 0.5, 1]
    everywhere = grid.ravel().tolist()
    ends = "both" if signed else "max"
    bar = figure.colorbar(scalar, ax=everywhere, location="bottom", shrink=0.6, aspect=40, ticks=ticks, extend=ends)
    bar.ax.set_xticklabels([f"{tick:g}" for tick in ticks])
    bar.set_label(f"F / its 99th percentile in the layer  ({unit})")
    bar.outline.set_visible(False)
    handles = [mpl.patches.Patch(color=theme.kept, label="kept"), mpl.patches.Patch(color=theme.pruned, label="pruned")]
    figure.legend(handles=handles, loc="outside upper right", ncols=2)
    return figure


def _heat_map(
    axes: "Axes", matrix: np.ndarray, order: np.ndarray, plan: LayerPlan, theme: Theme, norm: Any, colors: Any
) -> None:
    from matplotlib.collections import PolyCollection

    count = len(order)
    top = np.quantile(np.abs(matrix), 0.99) or np.abs(matrix).max() or 1.0
    axes.imshow(matrix[np.ix_(order, order)] / top, norm=norm, cmap=colors, interpolation="nearest")
    near, far = -0.5 - 0.02 * count, -0.5 - 0.065 * count
    above = [[(e - 0.5, near), (e + 0.5, near), (e + 0.5, far), (e - 0.5, far)] for e in range(count)]
    beside = [[(y, x) for x, y in corners] for corners in above]
    shades = [theme.kept if is_kept else theme.pruned for is_kept in np.isin(order, plan.kept)]
    axes.add_collection(PolyCollection(above + beside, facecolors=shades * 2, linewidths=0))
    axes.set_xlim(far, count - 0.5)
    axes.set_ylim(count - 0.5, far)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
