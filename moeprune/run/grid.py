"""Many runs from one file: one recording serves all that share it, and one pass of the teacher serves many plans.

Runs that read the same model, calibration and evaluation are measured together, in batches of AT_ONCE: the teacher's
distributions are computed once a batch of tokens and never stored. A finished run is on disk; a killed grid goes on
with those that are not.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import read_json, write_json
from moeprune.artifacts.plan import PrunePlan
from moeprune.artifacts.run import STAGES, done_stages
from moeprune.config.grid_file import load_grid, only
from moeprune.config.schema import RunConfig
from moeprune.console import say, speak, warn
from moeprune.evaluation.measure import Measured
from moeprune.run.directory import locked, require_place
from moeprune.run.evaluate_stage import measure
from moeprune.run.pipeline import ON_THE_SPOT, run_pipeline
from moeprune.run.requirements import require_config, require_stages
from moeprune.run.run_data import Inputs, common, shared_inputs
from moeprune.run.select_stage import baseline_options
from moeprune.run.stages import OWN
from moeprune.run.workers import Errors, Group, over_processes, over_ray, require_ray

AT_ONCE = 6  # runs measured together: a kill loses at most their measurements

Runs = Mapping[str, RunConfig]


@dataclass(frozen=True)
class GridOutcome:
    directory: Path
    done: list[str]
    failed: dict[str, str]  # run -> what went wrong
    report: Path


def run_grid(
    path: Path,
    overrides: Sequence[str],
    *,
    output: Path,
    pattern: str | None = None,
    workers: int = 1,
    ray: str | None = None,
) -> GridOutcome:
    """Every run of the grid, or those whose name matches; a failed run is recorded and the rest go on.

    workers: processes of this machine; ray: the address of a cluster instead, or "local". Neither changes a result.
    Raises InputError before the first run for anything a run could not work with.
    """
    if workers < 1:
        raise InputError(f"--workers {workers}: give at least 1")
    if ray is not None:
        if workers > 1:
            raise InputError(f"--workers {workers} --ray {ray}: give one of them; Ray spreads over its own machines")
        require_ray(ray)
    directory = output / path.stem
    every = {name: _in_group(config, path.stem) for name, config in load_grid(path, overrides).items()}
    runs = only(every, pattern)
    if any((directory / name).exists() for name in ("run.json", "config.yaml")):
        raise InputError(f"{directory} holds a run, not a grid; give another --output, or rename the grid's file")
    known: dict[str, Inputs] = {}
    for name, config in runs.items():
        require_place(directory / name, config)
        inputs = shared_inputs(config, known)
        require_config(inputs)
        # On a cluster other machines do the work: each checks its own memory.
        require_stages(inputs, set(STAGES) - done_stages(directory / name) - (ON_THE_SPOT if ray else set()))
    failed: dict[str, str] = {}
    _write(directory, every, runs, failed)
    groups = _groups(runs)
    say(f"grid: {len(runs)} of {len(every)} runs in {directory}, {len(groups)} groups")
    started = time.monotonic()
    done = 0
    for group, errors in _results(groups, directory, output / "shared", known, workers=workers, ray=ray):
        failed |= errors
        done += len(group)
        left = (time.monotonic() - started) / done * (len(runs) - done)
        say(f"grid: {done} of {len(runs)} runs, about {left / 60:.1f} minutes left")
        _write(directory, every, runs, failed)
    for name, error in failed.items():
        warn(f"run {name} failed: {error}")
    from moeprune.report.grid_report import write_grid_report

    report = write_grid_report(directory)
    return GridOutcome(directory, [name for name in runs if name not in failed], failed, report)


def _write(directory: Path, every: Runs, runs: Runs, failed: Mapping[str, str]) -> None:
    """grid.json: every run of the grid, and which failed.

    Keeps failures that other calls recorded for runs this call did not select. The file is read anew each time: the
    calls of a job array write here at the same time.
    """
    path = directory / "grid.json"
    with locked(directory):
        recorded = read_json(path).get("failed", {}) if path.is_file() else {}
        others = {name: why for name, why in recorded.items() if name in every and name not in runs}
        write_json(path, {"runs": list(every), "failed": others | dict(failed)})


def _in_group(config: RunConfig, grid: str) -> RunConfig:
    """The config with the grid as its W&B group, unless it names one."""
    if config.tracking.group is not None:
        return config
    return config.model_copy(update={"tracking": config.tracking.model_copy(update={"group": grid})})


def _groups(runs: Runs) -> list[Group]:
    """Runs that can be measured together, at most AT_ONCE in a group."""
    alike: dict[str, dict[str, RunConfig]] = {}
    for name, config in runs.items():
        alike.setdefault(common(config), {})[name] = config
    chunks = []
    for group in alike.values():
        names = list(group)
        chunks += [{n: group[n] for n in names[i : i + AT_ONCE]} for i in range(0, len(names), AT_ONCE)]
    return chunks


def _results(
    groups: list[Group], directory: Path, shared: Path, known: dict[str, Inputs], *, workers: int, ray: str | None
) -> Iterator[tuple[Group, Errors]]:
    """(group, errors by run) of every group as it ends. known: the models and data that this process has read."""
    if workers > 1 or ray is not None:
        known.clear()  # other processes do the work
    if ray is not None:
        yield from over_ray(groups, _run_alone, directory, shared, address=ray)
    elif workers > 1:
        yield from over_processes(groups, _run_alone, directory, shared, workers=workers)
    else:
        for group in groups:
            yield group, _run_group(group, directory, shared, known)


def _run_alone(group: Group, directory: Path, shared: Path) -> Errors:
    """The group in a process of its own."""
    speak()
    return _run_group(group, directory, shared, {})


def _run_group(group: Runs, directory: Path, shared: Path, known: dict[str, Inputs]) -> Errors:
    """Run -> error of those that failed. Plans first, then one measurement for all, then each run's own files."""
    errors: Errors = {}
    ready = {name: shared_inputs(config, known) for name, config in group.items()}

    def attempt(name: str, **options: Any) -> None:
        try:
            run_pipeline(group[name], directory / name, shared=shared, inputs=ready[name], **options)
        except KeyboardInterrupt:
            raise
        except Exception as error:  # noqa: BLE001 (a failed run is recorded, the rest of the grid goes on)
            errors[name] = f"{type(error).__name__}: {error}"

    for name in group:
        attempt(name, until="dense")
    # A compressed model is no plan of the shared model: its run measures it alone.
    alike = {name: ready[name] for name in group if name not in errors and not group[name].dense}
    measurements = _Together(alike, directory)
    for name in group:
        if name not in errors:
            attempt(name, measuring=measurements.of(name))
    return errors


class _Together:
    """One measurement of the plans of several runs, taken when the first of them needs its part."""

    def __init__(self, inputs: Mapping[str, Inputs], directory: Path) -> None:
        self._inputs, self._directory = inputs, directory
        self._measured: Measured | None = None

    def of(self, name: str) -> Any:
        def measuring(inputs: Inputs, plans: Mapping[str, PrunePlan]) -> Measured:
            if self._measured is None:
                self._measured = measure(inputs, self._pending(name))
            metrics, warnings = self._measured
            if any(f"{name}/{label}" not in metrics for label in plans):  # its stage looked finished, and is not
                return measure(inputs, plans)
            return {label: metrics[f"{name}/{label}"] for label in plans}, warnings

        return measuring

    def _pending(self, first: str) -> dict[str, PrunePlan]:
        """Every plan of the first run, and of the others that are not evaluated yet."""
        pending: dict[str, PrunePlan] = {}
        for name, inputs in self._inputs.items():
            folder = self._directory / name
            if name != first and "evaluate" in done_stages(folder):
                continue
            pending[f"{name}/{OWN}"] = PrunePlan.load(folder / "plan.json")
            for label in baseline_options(inputs.config):
                pending[f"{name}/{label}"] = PrunePlan.load(folder / "baselines" / label / "plan.json")
        return pending
