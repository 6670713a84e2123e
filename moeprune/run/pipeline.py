"""One run: record, select, prune, dense, evaluate, report. Each stage is done once and found again by its key."""

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.plan import PrunePlan
from moeprune.artifacts.run import STAGES
from moeprune.config.load import load_run
from moeprune.config.schema import RunConfig
from moeprune.console import logged, say
from moeprune.evaluation.measure import Measured
from moeprune.run import dense_stage, stages
from moeprune.run.directory import Run, locked, require_place
from moeprune.run.evaluate_stage import evaluate_stage, measure
from moeprune.run.requirements import require_config, require_stages
from moeprune.run.run_data import Inputs
from moeprune.run.select_stage import select_stage
from moeprune.run.team import assist

ON_THE_SPOT = {"select", "dense"}  # stages whose requirements depend on the machine that does the work


Measuring = Callable[[Inputs, Mapping[str, PrunePlan]], Measured] | None


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
    require_config(inputs)
    shared = shared or directory.parent / "shared"
    if inputs.team is not None:
        _join(inputs, shared, grid=grid)
    # Where the leader's work before the recording fails, torchrun's other processes end with its error.
    telling = nullcontext if inputs.team is None else inputs.team.telling
    wanted = set(STAGES[: STAGES.index(until) + 1])
    if grid:
        wanted &= ON_THE_SPOT  # a grid has checked the others
    with telling():
        require_place(directory, config)
        begun = (directory / "run.json").is_file()
        if not begun:
            require_stages(inputs, wanted)  # before there is a directory
        run = Run.open(directory, config)
    with locked(directory), logged(directory / "log.txt"):
        run.reread()
        if begun:
            again = STAGES[STAGES.index(redo) :] if redo else ()
            with telling():
                require_stages(inputs, wanted - (set(run.record.stages) - set(again)))
        if redo == "record":
            stages.discard_recording(inputs, shared)
        if redo is not None:
            run.forget(redo)
        failed = True
        try:
            outcome = _run(run, inputs, shared, until, measuring)
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


def _run(run: Run, inputs: Inputs, shared: Path, until: str, measuring: Measuring) -> Outcome:
    say(f"run: {run.directory}")
    statistics = stages.record_stage(run, inputs, shared)
    if until == "record":
        recorded = os.path.normpath(run.directory / run.record.stages["record"]["statistics"])
        return _outcome(run, {}, Path(recorded))
    plans = select_stage(run, inputs, statistics)
    if until == "select":
        return _outcome(run, {}, run.directory / "plan.json")
    checkpoint = stages.prune_stage(run, inputs, plans[stages.OWN])
    if run.config.dense and until != "prune":
        checkpoint = dense_stage.dense_stage(run, inputs, plans[stages.OWN], checkpoint)
        measuring = partial(measure, written=run.directory / checkpoint["checkpoint"])
    if until in ("prune", "dense"):
        return _outcome(run, {}, run.directory / (checkpoint["checkpoint"] or "run.json"))
    metrics = evaluate_stage(run, inputs, plans, checkpoint, measuring=measuring)
    if until == "evaluate":
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
