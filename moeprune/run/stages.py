"""How a stage is done once and found again; and the stages record, prune and report: inputs in, files out."""

import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moeprune.artifacts.plan import PrunePlan
from moeprune.artifacts.statistics import RoutingStatistics
from moeprune.checkpoint.prune import PruneReport, prune_checkpoint
from moeprune.checkpoint.record import keep_results
from moeprune.console import progress, say, warn
from moeprune.run.directory import Run, locked, stage_key
from moeprune.run.run_data import Inputs
from moeprune.run.team import leading, recorded

OWN = "own"  # label of the run's own criterion among the plans that are measured together
PRUNED = "pruned"  # directory of the pruned model while `dense` has yet to make the checkpoint of it
SIZES = ("parameters", "parameters_base", "bytes", "bytes_base")  # in the entry of a stage that makes the checkpoint
Entry = dict[str, Any]


def stage(run: Run, name: str, key: str, work: Callable[[], tuple[Entry, list[str]]]) -> Entry:
    """The stage's entry: that of run.json when its key is the same, otherwise the one that `work` returns."""
    done = run.recall(name, key)
    lost = [] if done is None else lost_files(run, done)
    if done is not None and not lost:
        say(f"{name}: already done ({key}), reused")
        return done
    if lost:
        say(f"{name}: done ({key}), but {', '.join(lost)} is gone; running again")
    started = time.monotonic()
    run.begin(name)
    entry, warnings = work()
    for warning in warnings:
        if warning not in run.tracker.warnings:  # the tracker has shown its own
            warn(warning)
    entry = {"key": key, "seconds": round(time.monotonic() - started, 3), **entry}
    run.tracker.log({f"stage/{name}/seconds": entry["seconds"]})
    run.finish(name, entry, warnings)
    return entry


def lost_files(run: Run, entry: Entry) -> list[str]:
    """Files of a finished stage that are no longer there; `pruned/` does not count, the dense stage removes it."""
    names = [entry[kind] for kind in ("statistics", "plan", "checkpoint", "metrics", "report") if entry.get(kind)]
    names += [f"baselines/{label}/plan.json" for label in entry.get("baselines", ())]
    return [name for name in names if name != PRUNED and not (run.directory / name).exists()]


def recording_path(inputs: Inputs, shared: Path) -> tuple[str, Path]:
    """The key of the recording that these inputs ask for, and where it lies."""
    key = stage_key("record", inputs.model.identity, inputs.data.calibration_identity)
    return key, shared / f"record-{key}" / "statistics.safetensors"


def discard_recording(inputs: Inputs, shared: Path) -> None:
    """Remove the shared recording, so that the record stage makes it again."""
    _, path = recording_path(inputs, shared)
    with locked(path.parent):
        path.unlink(missing_ok=True)
        shutil.rmtree(partial_of(path), ignore_errors=True)


def record_stage(run: Run, inputs: Inputs, shared: Path) -> RoutingStatistics:
    """Routing statistics, from the shared recording of the same model and data when there is one."""
    key, path = recording_path(inputs, shared)

    def work() -> tuple[Entry, list[str]]:
        with locked(path.parent):
            reused = path.is_file()
            if not reused:
                record_to(path, inputs, key)
        statistics = RoutingStatistics.load(path)
        say(f"record: {'reused' if reused else 'written'} {path}")
        entry: Entry = {"statistics": os.path.relpath(path, run.directory), "reused": reused}
        entry["tokens_per_second"] = statistics.manifest["tokens_per_second"]
        run.tracker.log(intake_counts(statistics))
        return entry, list(statistics.manifest["warnings"])

    with leading(inputs):
        stage(run, "record", key, work)
    return RoutingStatistics.load(path)


def intake_counts(statistics: RoutingStatistics) -> dict[str, float]:
    """`calibration/<domain>/<count>`: records and tokens read, used, skipped by reason, by role; for the tracker."""
    counts: dict[str, float] = {}
    for domain, manifest in statistics.manifest["domains"].items():
        for name in ("records_read", "records_used", "tokens", "counted"):
            counts[f"calibration/{domain}/{name}"] = manifest[name]
        for name in ("records_skipped", "tokens_by_role"):
            counts |= {f"calibration/{domain}/{name}/{key}": count for key, count in manifest[name].items()}
    return counts


def record_to(path: Path, inputs: Inputs, key: str) -> None:
    """Record the inputs' calibration tokens into `path`; whole batches are kept beside it until it is written."""
    tokens = inputs.data.calibration
    total = sum(len(sequence.ids) for sequence in tokens.sequences)
    say(f"record: {total:,} tokens of {', '.join(tokens.manifest)} through {len(inputs.model.layers)} MoE layers")
    started = time.monotonic()
    partial = partial_of(path)
    statistics = recorded(inputs, partial, key)
    rate = round(total / (time.monotonic() - started), 1)
    manifest = {**statistics.manifest, "tokens_per_second": rate}
    RoutingStatistics(manifest, statistics.layers, statistics.domains, statistics.half).save(path)
    shutil.rmtree(partial, ignore_errors=True)


def partial_of(path: Path) -> Path:
    """Where a recording that will be `path` keeps what it has so far."""
    return path.with_name(path.name + ".partial")


def prune_stage(run: Run, inputs: Inputs, plan: PrunePlan) -> Entry:
    """The pruned checkpoint, or only its size when `checkpoint.save` is false."""
    options = run.config.checkpoint
    written = options.model_dump(mode="json", exclude={"layout"})
    key = stage_key("prune", inputs.model.identity, written, plan.model_dump(mode="json"))
    target = run.directory / (PRUNED if run.config.dense else "checkpoint")

    def work() -> tuple[Entry, list[str]]:
        if not options.save:
            sizes = kept_sizes(inputs, plan)
            say(f"prune: in memory only; {sizes['parameters']:,} of {sizes['parameters_base']:,} parameters stay")
            return {"checkpoint": None, **sizes}, []
        report = write_pruned(run, inputs, plan, target)
        sizes = {name: getattr(report, name) for name in SIZES}
        say(f"prune: {report.parameters:,} of {report.parameters_base:,} parameters, {report.bytes / 1e6:,.1f} MB")
        return {"checkpoint": target.name, **sizes}, list(report.warnings)

    return stage(run, "prune", key, work)


def write_pruned(run: Run, inputs: Inputs, plan: PrunePlan, target: Path) -> PruneReport:
    """The pruned checkpoint at `target`, in the run's own directory."""
    with progress("writing", unit="bytes") as advance:
        return prune_checkpoint(
            inputs.model.directory,
            plan,
            target,
            overwrite=True,
            mtp=run.config.checkpoint.mtp,
            on_progress=advance,
            provenance={"config": run.config.model_dump(mode="json"), "commit": run.record.commit},
        )


def kept_sizes(inputs: Inputs, plan: PrunePlan) -> Entry:
    """Parameters and bytes with and without the pruned experts, from the checkpoint's headers; layers may differ."""
    share = {layer.name: len(layer.kept) / layer.num_experts for layer in plan.layers}
    sizes = dict.fromkeys(SIZES, 0.0)
    for tensor in inputs.model.checkpoint.tensors:
        kept = share[tensor.layer] if tensor.layer in share and tensor.role in ("expert", "fused", "router") else 1.0
        for name, count in (("parameters", tensor.entry.elements), ("bytes", tensor.entry.size)):
            sizes[f"{name}_base"] += count
            sizes[name] += count * kept
    return {name: round(total) for name, total in sizes.items()}


def report_stage(run: Run, plans: Mapping[str, PrunePlan], metrics: Mapping[str, float]) -> Path:
    """report.html and report.md, and the mirror of the run in W&B."""
    from moeprune.report.run_report import write_report

    key = stage_key("report", run.record.stages["evaluate"]["key"], run.record.stages["select"]["key"])

    def work() -> tuple[Entry, list[str]]:
        write_report(run.directory)
        return {"report": "report.html"}, track(run, plans[OWN], metrics)

    keep_results(run.directory / "checkpoint", metrics)  # each time: the checkpoint may have been made again
    stage(run, "report", key, work)
    return run.directory / "report.html"


def track(run: Run, plan: PrunePlan, metrics: Mapping[str, float]) -> list[str]:
    """Mirror metrics, the per-layer table, figures and the plan; returns what W&B could not do. Never weights."""
    tracker = run.tracker
    tracker.log(metrics)
    columns = ["layer", "experts", "kept", "cost", "bound", "gap", "status", "kept ids"]
    rows = [
        [la.name, la.num_experts, len(la.kept), la.cost, la.bound, la.gap, la.status, " ".join(map(str, la.kept))]
        for la in plan.layers
    ]
    tracker.table("layers", columns, rows)
    for figure in sorted((run.directory / "figures").glob("*.png")):
        tracker.image(f"figures/{figure.stem}", figure)
    lineage = {"statistics_key": plan.statistics_key, "model_fingerprint": plan.model_fingerprint}
    tracker.artifact(f"plan-{run.directory.name}", "plan", [run.directory / "plan.json"], lineage)
    return list(tracker.warnings)
