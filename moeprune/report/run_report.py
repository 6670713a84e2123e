"""The report of one run: report.html (self-contained), report.md and figures/*.png, from the run directory alone."""

import csv
import io
from collections.abc import Collection
from pathlib import Path

from moeprune.artifacts.files import whole_file, write_text
from moeprune.experiment import report_details as details
from moeprune.experiment import report_pictures, report_result, report_summary
from moeprune.experiment.report_parts import Report, render
from moeprune.experiment.run_record import RunRecord, read_run

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
        report_summary.overview(record),
        report_summary.asked(record),
        report_result.result(record),
        report_result.methods(record),
        report_pictures.pictures(record),
        details.layers(record),
        details.compression(record),
        details.data(record),
        details.warnings(record),
        details.provenance(record),
    ]
    verdict = report_summary.verdict(record)
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
