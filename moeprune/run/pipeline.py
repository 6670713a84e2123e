"""One run: record, select, prune, dense, evaluate, report. Each stage is done once and found again by its key.

What would stop a run, found before its first stage: nothing is recorded, and no directory is made, in vain.
"""

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.plan import PrunePlan
from moeprune.artifacts.run import STAGES
from moeprune.config.load import load_run
from moeprune.config.schema import RunConfig
from moeprune.console import logged, say
from moeprune.run import dense_stage, stages
from moeprune.run.directory import Run, locked, require_place
from moeprune.run.opened import Inputs
from moeprune.run.select_stage import require_refinable, select_stage
from moeprune.run.team import assist, telling
from moeprune.selection.criteria.outside import PruneSetFile
from moeprune.selection.given_plan import plan_from_file

ON_THE_SPOT = {"select", "dense"}  # stages whose requirements depend on the machine that does the work


def require(inputs: Inputs, left: Collection[str]) -> None:
    """Raises InputError for what would stop one of these stages, of inspected inputs; no weights are loaded for it."""
    if "select" in left and inputs.config.refine:
        require_refinable(inputs)
    if "prune" in left:
        require_one_count(inputs)
    if "dense" in left and inputs.config.dense:
        dense_stage.require_compressible(inputs)
    if "evaluate" in left:
        require_ruler(inputs)


def require_one_count(inputs: Inputs) -> None:
    """Raises InputError where a checkpoint is wanted of a plan that keeps other counts in other layers."""
    config, layers = inputs.config, inputs.layers
    if not config.checkpoint.save or len(layers) == 1:
        return
    criterion = config.selection.criterion
    if isinstance(criterion, PruneSetFile):
        plans, _ = plan_from_file(criterion, layers, config.selection)
        uneven, who = len({len(plan.kept) for plan in plans}) > 1, str(criterion.path)
    else:
        uneven, who = config.selection.budget.scope == "global", "selection.budget.scope: global"
    if uneven:
        memory = "" if config.dense else "set checkpoint.save=false to measure the plan in memory, or "
        raise InputError(
            f"{who} keeps different numbers of experts in {layers[0].name} .. {layers[-1].name}, and a checkpoint's "
            f"config holds one count for all; {memory}give every layer the same count (scope: layer)"
        )


def require_ruler(inputs: Inputs) -> None:
    """Raises InputError where the evaluation's data or questions cannot be read; what is read is kept."""
    _ = inputs.evaluation, inputs.questions


Measuring = Callable[[Inputs, Mapping[str, PrunePlan]], stages.Measured] | None


@dataclass(frozen=True)
class Outcome:
    """What a run left: its directory, its metrics (empty when it stopped before them) and what readers must know."""

    directory: Path
    metrics: dict[str, float]
    warnings: list[str]
    written: Path  # the last thing that was written


def run_pipeline(
    config: RunConfig,
    directory: Path,
    *,
    shared: Path | None = None,
    until: str = "report",
    redo: str | None = None,
    inputs: Inputs | None = None,
    measuring: Measuring = None,
) -> Outcome:
    """Run every stage up to `until`; stages that are done under the same key are reused.

    directory: of this run; shared: of recordings that several runs use (default: `shared/` beside the run).
    redo: this stage and those after it run again. inputs, measuring: what a grid shares between its runs.
    Raises InputError for bad input, before the expensive stage.
    """
    grid = inputs is not None
    inputs = inputs or Inputs(config)
    inputs.inspect()
    shared = shared or directory.parent / "shared"
    if inputs.team is not None:
        _join(inputs, shared, grid=grid)
    last = STAGES.index(until)
    asked = set(STAGES[: last + 1]) & (ON_THE_SPOT if grid else set(STAGES))  # a grid has looked at the rest
    with telling(inputs):
        require_place(directory, config)
        begun = (directory / "run.json").is_file()
        if not begun:
            require(inputs, asked)  # before there is a directory
        run = Run.open(directory, config)
    with locked(directory), logged(directory / "log.txt"):
        run.reread()
        if begun:
            again = STAGES[STAGES.index(redo) :] if redo else ()
            with telling(inputs):
                require(inputs, asked - (set(run.record.stages) - set(again)))
        if redo == "record":
            stages.discard_recording(inputs, shared)
        if redo is not None:
            run.forget(redo)
        failed = True
        try:
            outcome = _run(run, inputs, shared, last, measuring)
            failed = False
        finally:
            run.close(int(failed))
        return outcome


def _join(inputs: Inputs, shared: Path, *, grid: bool) -> None:
    """Let all of torchrun's processes but the first do their share of the recording and end there."""
    if grid:
        raise InputError("grid: torchrun spreads one recording over processes; start a grid as one, with --workers N")
    assert inputs.team is not None
    if not inputs.team.leads:
        key, path = stages.recording_path(inputs, shared)
        assist(inputs, stages.partial_of(path), key)
        raise SystemExit(0)


def _run(run: Run, inputs: Inputs, shared: Path, last: int, measuring: Measuring) -> Outcome:
    say(f"run: {run.directory}")
    statistics = stages.record_stage(run, inputs, shared)
    if last == STAGES.index("record"):
        recorded = os.path.normpath(run.directory / run.record.stages["record"]["statistics"])
        return _outcome(run, {}, Path(recorded))
    plans = select_stage(run, inputs, statistics)
    if last == STAGES.index("select"):
        return _outcome(run, {}, run.directory / "plan.json")
    made = stages.prune_stage(run, inputs, plans[stages.OWN])
    if last == STAGES.index("prune"):
        return _outcome(run, {}, run.directory / (made["checkpoint"] or "run.json"))
    if run.config.dense:
        made = dense_stage.dense_stage(run, inputs, plans[stages.OWN], made)
        measuring = partial(dense_stage.measure_written, directory=run.directory / made["checkpoint"])
    if last == STAGES.index("dense"):
        return _outcome(run, {}, run.directory / (made["checkpoint"] or "run.json"))
    metrics = stages.evaluate_stage(run, inputs, plans, made, measuring=measuring)
    if last == STAGES.index("evaluate"):
        return _outcome(run, metrics, run.directory / "metrics.json")
    return _outcome(run, metrics, stages.report_stage(run, plans, metrics))


def _outcome(run: Run, metrics: dict[str, float], written: Path) -> Outcome:
    return Outcome(run.directory, metrics, list(run.record.warnings), written)


def run_file(
    config: Path, overrides: list[str], *, output: Path, until: str | None = None, redo: str | None = None
) -> Outcome:
    """`run_pipeline` on a YAML file; the run is called like the file and lies in `output`.

    A W&B sweep's agent starts one command with ever other values: each run gets a directory under the sweep's id.
    """
    for option, stage in (("--until", until), ("--redo", redo)):
        if stage is not None and stage not in STAGES:
            raise InputError(f"{option} {stage}: unknown stage; one of {', '.join(STAGES)}")
    options = load_run(config, overrides)
    directory = output / config.stem
    sweep, run_id = (os.environ.get(f"WANDB_{name}_ID") for name in ("SWEEP", "RUN"))
    if sweep and run_id:
        directory = output / f"{config.stem}-{sweep}" / run_id
    return run_pipeline(options, directory, shared=output / "shared", until=until or STAGES[-1], redo=redo)
