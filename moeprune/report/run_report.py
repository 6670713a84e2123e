"""The report of one run: report.html (self-contained), report.md and figures/*.png, from the run directory alone."""

import csv
import io
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moeprune.artifacts.files import write_text
from moeprune.report import details, draw_run, results
from moeprune.report.draw_run import cluster_order, interaction_figure
from moeprune.report.page import Code, Picture, Report
from moeprune.report.run_record import Measure, RunRecord, read_run
from moeprune.report.style import Theme
from moeprune.selection.criteria.hope import interaction

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("html", "md")  # what a run leaves; report.csv is written when it is asked for


def write_report(run_dir: Path, *, formats: Collection[str] = FORMATS) -> Path:
    """The path of the first of html, md, csv that was asked for, in the run directory; Markdown brings figures/*.png.

    Reads config.yaml, run.json, plan.json, baselines/*/plan.json, metrics.json and the statistics file that run.json
    names; the report says what is missing. Raises InputError when the directory is no run directory.
    """
    record = read_run(run_dir)
    written = run_report(record).save(record.directory, formats=formats)
    if "csv" in formats:
        written.append(record.directory / "report.csv")
        write_text(written[-1], as_csv(record))
    return written[0]


def run_report(record: RunRecord) -> Report:
    """run.md.jinja with the values of this run."""
    holes: list[Callable[[RunRecord], Any]] = [
        *(results.verdict, results.first_numbers, results.request, results.ranking),
        *(results.domain_table, results.model_table, results.method_table),
        *(details.layer_table, details.dense_table, details.compression),
        *(details.data_table, details.role_table, details.skipped, details.warnings),
        *(details.stage_table, details.facts),
    ]
    values = {function.__name__: function(record) for function in holes}
    layers = record.plan.layers if record.plan else ()
    values |= {
        "record": record,
        "subtitle": _subtitle(record),
        "pairwise": _sees_pairs(record),
        "certified": any(layer.bound is not None for layer in layers),
        "halved": any(layer.stability is not None for layer in layers),
        "config_name": f"`{record.name}.yaml`",
        "command": Code(f"moeprune run {record.name}.yaml --output again", "sh"),
        "config": Code(record.config_text, "yaml") if record.config_text else None,
    }
    return Report("run.md.jinja", record.name, values, pictures(record))


def as_csv(record: RunRecord) -> str:
    """One line a measure: method (the run's own first), metric, value, interval, the unpruned model's value."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["method", "criterion", "metric", "value", "ci_low", "ci_high", "base"])
    for method in record.methods:
        for name in method.metrics:
            value = None if name.endswith(("/ci_low", "/ci_high", "/base")) else method.measure(name)
            if value is not None and "/base/" not in name:
                ends = ["" if end is None else end for end in (value.low, value.high, value.base)]
                writer.writerow([method.label or record.name, method.name, name, value.value, *ends])
    return out.getvalue()


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


def _sees_pairs(record: RunRecord) -> bool:
    """Whether the run's criterion looks at pairs of experts."""
    criterion = record.plan.criterion if record.plan else {}
    return criterion.get("name") == "hope" and bool(criterion.get("pairwise", True))


def pictures(record: RunRecord) -> dict[str, Picture]:
    """KL of all methods; F with the pruned experts marked; the kept map; frequency against saliency; by their stems."""
    drawn = [_kl_picture(record)]
    if record.plan:
        plans, dead, sums = record.plan.layers, record.dead, record.mixed
        if sums and all(float(layer.tokens) > 0 for layer in sums.values()):
            drawn.append(_interaction_picture(record))
        alt = "Map of kept and pruned experts, one row a layer"
        drawn.append(Picture("kept", lambda theme: draw_run.kept_map(plans, dead, theme), alt))
        if sums and all(float(layer.tokens) > 0 for layer in sums.values()):
            alt = "Scatter plots of routing frequency against mean gated output norm for every expert"
            drawn.append(Picture("frequency", lambda theme: draw_run.frequency_figure(sums, plans, theme), alt))
    return {picture.stem: picture for picture in drawn if picture}


def _kl_picture(record: RunRecord) -> Picture | None:
    bars: dict[str, dict[str, Measure]] = {}
    for domain in record.domains:
        known = {m.name: value for m in record.methods if (value := m.measure(f"fidelity/kl/{domain}"))}
        if known:
            bars[domain] = known
    if not bars:
        return None
    styles = {m.name: m.style for m in record.methods if any(m.name in row for row in bars.values())}
    notes = {domain: "" if domain in record.calibrated else "not in calibration" for domain in bars}
    alt = f"Bars of KL to the unpruned model for {', '.join(styles)} on {', '.join(bars)}, with intervals"
    return Picture("kl", lambda theme: draw_run.kl_bars(bars, styles, theme, notes=notes), alt)


def _interaction_picture(record: RunRecord) -> Picture:
    assert record.plan is not None
    plans, criterion = record.plan.layers, record.plan.criterion
    product, normalise = "norms", "all_tokens"
    if criterion.get("name") == "hope":
        product, normalise = criterion.get("product", product), criterion.get("normalise", normalise)
    options: dict[str, Any] = {"product": product, "normalise": normalise, "shrinkage": criterion.get("shrinkage", 0.0)}
    per = "token that selects both" if normalise == "co_selected" else "counted token"

    @cache
    def matrices() -> dict[str, np.ndarray]:
        return {name: interaction(sums, **options) for name, sums in record.mixed.items()}

    @cache
    def orders() -> dict[str, np.ndarray]:
        return {name: cluster_order(matrix) for name, matrix in matrices().items()}

    def draw(theme: Theme) -> "Figure":
        return interaction_figure(matrices(), orders(), plans, theme, unit=f"{product}, per {per}")

    alt = f"Heat maps of the interaction matrix of {len(plans)} layers, experts in cluster order, pruned ones marked"
    return Picture("interaction", draw, alt)
