"""Figures of a run's report, with their captions."""

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from moeprune.experiment import figures
from moeprune.experiment.figure_style import Theme
from moeprune.experiment.interaction_figure import cluster_order, interaction_figure
from moeprune.experiment.report_parts import Paragraph, Part, Picture, Section
from moeprune.experiment.run_record import RunRecord
from moeprune.selection.interaction import interaction

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def pictures(record: RunRecord) -> Section:
    """KL of all methods; F with the pruned experts marked; the kept map; frequency against saliency."""
    drawn = [_kl_picture(record), _interaction_picture(record), _map_picture(record), _frequency_picture(record)]
    parts: list[Part] = [picture for picture in drawn if picture]
    if not record.mixed:
        reason = "there is no plan" if record.plan is None else "the statistics file is not there or is of other layers"
        parts.append(Paragraph(f"The interaction matrix and routing frequencies cannot be shown: {reason}."))
    return Section("Figures", parts)


def _kl_picture(record: RunRecord) -> Picture | None:
    bars: dict[str, dict[str, figures.Bar]] = {}
    for domain in record.domains:
        measured = {m.name: m.measure(f"fidelity/kl/{domain}") for m in record.methods}
        known = {name: v for name, v in measured.items() if v}
        if known:
            bars[domain] = {name: figures.Bar(v.value, v.low, v.high, str(v)) for name, v in known.items()}
    if not bars:
        return None
    styles = {m.name: m.style for m in record.methods if any(m.name in row for row in bars.values())}
    notes = {domain: "" if domain in record.calibrated else "not in calibration" for domain in bars}
    return Picture(
        "kl",
        lambda theme: figures.kl_bars(bars, styles, theme, notes=notes),
        alt=f"Bars of KL to the unpruned model for {', '.join(styles)} on {', '.join(bars)}, with intervals",
        caption="**KL to the unpruned model** by domain, the worst first; whiskers are 95 % intervals; shorter is "
        "better. Panels have their own scales: compare methods inside a panel, domains by the numbers. "
        "A bar that ends in // runs off the scale.",
    )


def _interaction_picture(record: RunRecord) -> Picture | None:
    if record.plan is None or not record.mixed or any(not float(s.tokens) > 0 for s in record.mixed.values()):
        return None
    criterion = record.plan.criterion
    product, normalise = "norms", "all_tokens"
    if criterion.get("name") == "hope":
        product, normalise = criterion.get("product", product), criterion.get("normalise", normalise)
    options: dict[str, Any] = {"product": product, "normalise": normalise, "shrinkage": criterion.get("shrinkage", 0.0)}
    used = criterion.get("name") == "hope" and criterion.get("pairwise", True)
    plans = record.plan.layers
    per = "token that selects both" if normalise == "co_selected" else "counted token"

    @cache
    def matrices() -> dict[str, np.ndarray]:
        return {name: interaction(sums, **options) for name, sums in record.mixed.items()}

    @cache
    def orders() -> dict[str, np.ndarray]:
        return {name: cluster_order(matrix) for name, matrix in matrices().items()}

    def draw(theme: Theme) -> "Figure":
        return interaction_figure(matrices(), orders(), plans, theme, unit=f"{product}, per {per}")

    return Picture(
        "interaction",
        draw,
        alt=f"Heat maps of the interaction matrix of {len(plans)} layers, experts in cluster order, pruned ones marked",
        caption="**Interaction F of every layer**: how much it costs to prune two experts together. Rows and columns "
        "are experts in cluster order (average linkage of the cosine of F), dead ones last; the bands along the edges "
        "mark kept and pruned experts. Bright blocks are experts that work together: F warns of pruning a whole block."
        + ("" if used else " This run's criterion does not look at pairs."),
    )


def _map_picture(record: RunRecord) -> Picture | None:
    if record.plan is None:
        return None
    plans, dead = record.plan.layers, record.dead
    return Picture(
        "kept",
        lambda theme: figures.kept_map(plans, dead, theme),
        alt="Map of kept and pruned experts, one row a layer",
        caption="**Kept and pruned experts** in the numbering of the unpruned model; right: kept of all.",
    )


def _frequency_picture(record: RunRecord) -> Picture | None:
    if record.plan is None or not record.mixed or any(not float(s.tokens) > 0 for s in record.mixed.values()):
        return None
    plans, sums = record.plan.layers, record.mixed
    paired = record.plan.criterion.get("name") == "hope" and record.plan.criterion.get("pairwise", True)
    return Picture(
        "frequency",
        lambda theme: figures.frequency_figure(sums, plans, theme),
        alt="Scatter plots of routing frequency against mean gated output norm for every expert",
        caption="**Routing frequency against saliency** (mean gated output norm of an expert's own tokens, REAP's "
        "score). Frequency prunes from the left, REAP from below"
        + ("; where the pruned set does neither, pairs decided." if paired else "."),
    )
