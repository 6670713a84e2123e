"""The stages of a run, one function each: inputs in, files on disk and an entry for run.json out."""

import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moeprune.artifacts.files import read_json, save_metrics
from moeprune.artifacts.plan import PrunePlan
from moeprune.artifacts.statistics import RoutingStatistics
from moeprune.checkpoint.prune import PruneReport, prune_checkpoint
from moeprune.checkpoint.record import keep_results
from moeprune.console import progress, say, warn
from moeprune.evaluation.agent import agent_task, loop_rate
from moeprune.run.directory import Run, locked, stage_key
from moeprune.run.opened import Inputs
from moeprune.run.team import compared, leading, recorded, unmeasured

OWN = "own"  # label of the run's own criterion among the plans that are measured together
PRUNED = "pruned"  # directory of the pruned model while `dense` has yet to make the checkpoint of it
Entry = dict[str, Any]
Measured = tuple[dict[str, dict[str, float]], list[str]]  # label -> metrics; what their readers must know


def stage(run: Run, name: str, key: str, work: Callable[[], tuple[Entry, list[str]]]) -> Entry:
    """The stage's entry: the one in run.json when it was made from the same inputs, otherwise what `work` leaves."""
    done = run.recall(name, key)
    lost = [] if done is None else _lost(run, done)
    if done is not None and not lost:
        say(f"{name}: already done ({key}), reused")
        return done
    if lost:
        say(f"{name}: done ({key}), but {', '.join(lost)} is gone; running again")
    started = time.monotonic()
    run.begin(name)
    entry, warnings = work()
    for warning in warnings:
        if warning not in run.tracker.warnings:  # it has said those itself
            warn(warning)
    entry = {"key": key, "seconds": round(time.monotonic() - started, 3), **entry}
    run.tracker.log({f"stage/{name}/seconds": entry["seconds"]})
    run.finish(name, entry, warnings)
    return entry


def _lost(run: Run, entry: Entry) -> list[str]:
    """Files that a finished stage left and somebody took away; `pruned/` goes by itself, when `dense` is done."""
    names = [entry[kind] for kind in ("statistics", "plan", "checkpoint", "metrics", "report") if entry.get(kind)]
    names += [f"baselines/{label}/plan.json" for label in entry.get("baselines", ())]
    return [name for name in names if name != PRUNED and not (run.directory / name).exists()]


def recording_path(inputs: Inputs, shared: Path) -> tuple[str, Path]:
    """The key of the recording that these inputs ask for, and where it lies."""
    key = stage_key("record", inputs.model_identity, inputs.calibration_identity)
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
    for domain, told in statistics.manifest["domains"].items():
        for name in ("records_read", "records_used", "tokens", "counted"):
            counts[f"calibration/{domain}/{name}"] = told[name]
        for name in ("records_skipped", "tokens_by_role"):
            counts |= {f"calibration/{domain}/{name}/{key}": count for key, count in told[name].items()}
    return counts


def record_to(path: Path, inputs: Inputs, key: str) -> None:
    """Record the inputs' calibration tokens into `path`; whole batches are kept beside it until it is written."""
    tokens = inputs.calibration
    total = sum(len(sequence.ids) for sequence in tokens.sequences)
    say(f"record: {total:,} tokens of {', '.join(tokens.manifest)} through {len(inputs.layers)} MoE layers")
    started = time.monotonic()
    partial = partial_of(path)
    statistics = recorded(inputs, partial, key)
    rate = round(total / (time.monotonic() - started), 1)
    RoutingStatistics({**statistics.manifest, "tokens_per_second": rate}, *_parts(statistics)).save(path)
    shutil.rmtree(partial, ignore_errors=True)


def partial_of(path: Path) -> Path:
    """Where a recording that will be `path` keeps what it has so far."""
    return path.with_name(path.name + ".partial")


def _parts(statistics: RoutingStatistics) -> tuple[Any, Any, Any]:
    return statistics.layers, statistics.domains, statistics.half


def prune_stage(run: Run, inputs: Inputs, plan: PrunePlan) -> Entry:
    """The pruned checkpoint, or only its size when `checkpoint.save` is false."""
    options = run.config.checkpoint
    written = options.model_dump(mode="json", exclude={"layout"})
    key = stage_key("prune", inputs.model_identity, written, plan.model_dump(mode="json"))
    target = run.directory / (PRUNED if run.config.dense else "checkpoint")

    def work() -> tuple[Entry, list[str]]:
        if not options.save:
            sizes = kept_sizes(inputs, plan)
            say(f"prune: in memory only; {sizes['parameters']:,} of {sizes['parameters_base']:,} parameters stay")
            return {"checkpoint": None, **sizes}, []
        report = write_pruned(run, inputs, plan, target)
        sizes = {
            "parameters": report.parameters,
            "parameters_base": report.parameters_base,
            "bytes": report.bytes,
            "bytes_base": report.bytes_base,
        }
        say(f"prune: {report.parameters:,} of {report.parameters_base:,} parameters, {report.bytes / 1e6:,.1f} MB")
        return {"checkpoint": target.name, **sizes}, list(report.warnings)

    return stage(run, "prune", key, work)


def write_pruned(run: Run, inputs: Inputs, plan: PrunePlan, target: Path) -> PruneReport:
    """The pruned checkpoint at `target`, in the run's own directory."""
    with progress("writing", unit="bytes") as advance:
        return prune_checkpoint(
            inputs.directory,
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
    sizes = dict.fromkeys(("parameters", "parameters_base", "bytes", "bytes_base"), 0.0)
    for tensor in inputs.checkpoint.tensors:
        kept = share[tensor.layer] if tensor.layer in share and tensor.role in ("expert", "fused", "router") else 1.0
        for name, count in (("parameters", tensor.entry.elements), ("bytes", tensor.entry.size)):
            sizes[f"{name}_base"] += count
            sizes[name] += count * kept
    return {name: round(total) for name, total in sizes.items()}


def evaluation_key(inputs: Inputs, plans: Mapping[str, PrunePlan], made: Entry) -> str:
    written = [plan.model_dump(mode="json", include={"layers"}) for plan in plans.values()]
    compressed = [made["key"]] if inputs.config.dense else []
    read = (inputs.model_identity, inputs.evaluation_identity, inputs.config.calibration)
    return stage_key("evaluate", *read, written, *compressed)


def evaluate_stage(
    run: Run,
    inputs: Inputs,
    plans: Mapping[str, PrunePlan],
    made: Entry,
    *,
    measuring: Callable[[Inputs, Mapping[str, PrunePlan]], Measured] | None = None,
) -> dict[str, float]:
    """metrics.json: the run's plan and its baselines against the unpruned model, on held-out data.

    made: the entry of the stage that made the checkpoint (prune, or dense), with its sizes and metrics of its own.
    measuring: where the measurements come from (default: `measure`); a grid measures several runs at once.
    """
    path = run.directory / "metrics.json"

    def work() -> tuple[Entry, list[str]]:
        measured, warnings = (measuring or measure)(inputs, plans)
        metrics = dict(measured[OWN])
        for label, values in measured.items():
            if label != OWN:
                metrics |= {f"baseline/{label}/{name}": value for name, value in values.items()}
        metrics |= size_metrics(made) | made.get("counts", {})
        stability = [layer.stability["jaccard"] for layer in plans[OWN].layers if layer.stability]
        if stability:
            metrics["stability/jaccard"] = sum(stability) / len(stability)
        save_metrics(path, metrics)
        return {"metrics": "metrics.json", "recorded": inputs.recorded}, warnings

    stage(run, "evaluate", evaluation_key(inputs, plans, made), work)
    return dict(read_json(path))


def size_metrics(sizes: Entry) -> dict[str, float]:
    return {
        "size/parameters": sizes["parameters"],
        "size/parameters/base": sizes["parameters_base"],
        "size/bytes": sizes["bytes"],
        "size/bytes/base": sizes["bytes_base"],
    }


def measure(inputs: Inputs, plans: Mapping[str, PrunePlan]) -> Measured:
    """Label -> metrics of every plan, all measured on the same tokens and questions; and what readers must know."""
    options, tokens = inputs.config.evaluation, inputs.evaluation
    comparisons = compared(inputs, plans)
    metrics = {label: comparison.metrics() for label, comparison in comparisons.items()}
    warnings = [*tokens.warnings, *next(iter(comparisons.values())).warnings]
    if not (options.tasks or options.code or options.loops or options.harness or options.speed):
        return metrics, warnings
    if not inputs.fits:
        return metrics, [*warnings, unmeasured(inputs)]
    loaded = inputs.loaded
    for task in options.tasks:
        say(f"evaluate: task {task}")
        questions, task_warnings = inputs.questions[task]
        warnings += task_warnings
        merge(metrics, agent_task(loaded.model, loaded.tokenizer, questions, plans, name=task))
    if options.code is not None:
        say(f"evaluate: programs of {options.code.problems}")
        from moeprune.evaluation.code import code_task, code_warnings

        warnings += code_warnings(options.code)
        merge(metrics, code_task(loaded.model, loaded.tokenizer, options.code, plans))
    if options.loops:
        say("evaluate: loop rate")
        merge(metrics, loop_rate(loaded.model, loaded.tokenizer, tokens, plans))
    if options.harness:
        say(f"evaluate: lm-eval {', '.join(options.harness)}")
        from moeprune.evaluation.harness import harness

        merge(metrics, harness(loaded.model, loaded.tokenizer, options.harness, plans))
    if options.speed:
        say("evaluate: speed")
        from moeprune.evaluation.speed import speed

        merge(metrics, speed(loaded.model, plans, tokens))
    return metrics, warnings


def merge(metrics: dict[str, dict[str, float]], more: Mapping[str, Mapping[str, float]]) -> None:
    for label, values in more.items():
        metrics[label].update(values)


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
