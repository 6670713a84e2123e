"""The interaction matrix of every layer as heat maps, experts that work together standing together."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from moeprune.artifacts.plan import LayerPlan
from moeprune.experiment.figure_style import WIDTH, Theme
from moeprune.experiment.figures import columns_of, short_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
    for index, axes in enumerate(grid.flat):
        if index >= len(plans):
            axes.set_visible(False)
            continue
        name = plans[index].name
        _heat_map(axes, matrices[name], orders[name], plans[index], theme, norm, colors)
        axes.set_title(short_name(name), loc="left", pad=4)
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
