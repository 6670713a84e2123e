"""Figures of a run's report, with their captions.

The report of one run: report.html (self-contained), report.md and figures/*.png, from the run directory alone.
"""

import csv
import io
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moeprune.artifacts.files import whole_file, write_text
from moeprune.report import details as details
from moeprune.report import draw_run, results
from moeprune.report.draw_run import cluster_order, interaction_figure
from moeprune.report.page import Paragraph, Part, Picture, Report, Section, render
from moeprune.report.run_record import RunRecord, read_run
from moeprune.report.style import Theme
from moeprune.selection.criteria.hope import interaction

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
    bars: dict[str, dict[str, draw_run.Bar]] = {}
    for domain in record.domains:
        measured = {m.name: m.measure(f"fidelity/kl/{domain}") for m in record.methods}
        known = {name: v for name, v in measured.items() if v}
        if known:
            bars[domain] = {name: draw_run.Bar(v.value, v.low, v.high, str(v)) for name, v in known.items()}
    if not bars:
        return None
    styles = {m.name: m.style for m in record.methods if any(m.name in row for row in bars.values())}
    notes = {domain: "" if domain in record.calibrated else "not in calibration" for domain in bars}
    return Picture(
        "kl",
        lambda theme: draw_run.kl_bars(bars, styles, theme, notes=notes),
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
        lambda theme: draw_run.kept_map(plans, dead, theme),
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
        lambda theme: draw_run.frequency_figure(sums, plans, theme),
        alt="Scatter plots of routing frequency against mean gated output norm for every expert",
        caption="**Routing frequency against saliency** (mean gated output norm of an expert's own tokens, REAP's "
        "score). Frequency prunes from the left, REAP from below"
        + ("; where the pruned set does neither, pairs decided." if paired else "."),
    )


FORMATS = ("html", "md")  # what a run leaves; report.csv is written when it is asked for


def write_report(run_dir: Path, *, formats: Collection[str] = FORMATS) -> Path:
    """The path of the first of html, md, csv that was asked for, in the run directory; Markdown brings figures/*.png.

    Reads config.yaml, run.json, plan.json, baselines/*/plan.json, metrics.json and the statistics file that run.json
    names; what is not there is said in the report. Raises InputError when the directory is no run directory.
    """
    record = read_run(run_dir)
    written = save_report(run_report(record), record.directory, formats=formats) if {*formats} - {"csv"} else []
    if "csv" in formats:
        written.append(record.directory / "report.csv")
        write_text(written[-1], as_csv(record))
    return written[0]


def run_report(record: RunRecord) -> Report:
    """The report's content, in reading order."""
    sections = [
        results.overview(record),
        results.asked(record),
        results.result(record),
        results.methods(record),
        pictures(record),
        details.layers(record),
        details.compression(record),
        details.data(record),
        details.warnings(record),
        details.provenance(record),
    ]
    verdict = results.verdict(record)
    return Report(record.name, _subtitle(record), verdict, [section for section in sections if section])


def as_csv(record: RunRecord) -> str:
    """One line a measure: method (the run's own first), metric, value, interval, the unpruned model's value."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["method", "criterion", "metric", "value", "ci_low", "ci_high", "base"])
    for method in record.methods:
        for name in method.metrics:
            found = None if name.endswith(("/ci_low", "/ci_high", "/base")) else method.measure(name)
            if found is not None and "/base/" not in name:
                ends = ["" if value is None else value for value in (found.low, found.high, found.base)]
                writer.writerow([method.label or record.name, method.name, name, found.value, *ends])
    return out.getvalue()


def save_report(report: Report, directory: Path, *, formats: Collection[str] = FORMATS) -> list[Path]:
    """The paths of report.html and report.md, as asked for; figures/*.png of an earlier report that has gone go too."""
    written = []
    if "html" in formats:
        write_text(directory / "report.html", render(report, "report.html.jinja"))
        written.append(directory / "report.html")
    if "md" in formats:
        _save_figures(report, directory / "figures")
        write_text(directory / "report.md", render(report, "report.md.jinja"))
        written.append(directory / "report.md")
    return written


def _save_figures(report: Report, directory: Path) -> None:
    stems = {picture.stem for picture in report.pictures}
    for picture in report.pictures:
        with whole_file(directory / f"{picture.stem}.png") as beside:
            beside.write_bytes(picture.images["light"])
    for old in directory.glob("*.png"):
        if old.stem not in stems:
            old.unlink()


def _subtitle(record: RunRecord) -> str:
    model = record.section("model", "path")
    created = str(record.run.get("created", ""))[:16].replace("T", " ")
    version = record.run.get("versions", {}).get("moeprune")
    facts = [
        "Expert pruning report",
        f"model `{model}`" if model else "",
        f"started {created}" if created else "",
        f"moeprune {version}" if version else "",
    ]
    return " · ".join(filter(None, facts))
