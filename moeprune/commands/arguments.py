"""The stages one by one, on files, for people who want one step: what the verbs of the command line do."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import existing_parent
from moeprune.artifacts.plan import PrunePlan
from moeprune.artifacts.statistics import RoutingStatistics
from moeprune.config.load import parse_scalar, validate
from moeprune.config.schema import RunConfig
from moeprune.console import say, warn
from moeprune.run.directory import stage_key
from moeprune.run.opened import Inputs

Values = Mapping[str, Any]


def record_file(
    model: str, domains: Sequence[str], output: Path, *, each: Values, calibration: Values, runtime: Values
) -> dict[str, Any]:
    """Record `NAME=PATH` domains into one statistics file; resumes where a killed call was."""
    from moeprune.run.stages import partial_of, record_to
    from moeprune.run.team import assist, leading

    require_writable(output, ".safetensors")
    named = [{"name": name, "path": path, **each} for name, path in map(name_and_value, domains)]
    value = {"model": {"path": model}, "calibration": {**calibration, "domains": named}, "runtime": dict(runtime)}
    config = validate(RunConfig, value, place="record")
    # Everything the user names is calibration: nothing is held out for an evaluation.
    evaluation = config.evaluation.model_copy(update={"domains": list(config.calibration.domains)})
    inputs = Inputs(config.model_copy(update={"evaluation": evaluation}))
    inputs.inspect_model()
    key = stage_key("record", inputs.model_identity, inputs.calibration_identity)
    if inputs.team is not None and not inputs.team.leads:
        assist(inputs, partial_of(output), key)
        raise SystemExit(0)
    with leading(inputs):
        if not output.is_file():
            record_to(output, inputs, key)
        elif RoutingStatistics.load(output).key == key:
            say(f"record: {output} already holds exactly this recording, reused")
        else:
            raise InputError(f"-o {output}: holds another recording; give another name, or remove the file")
    statistics = RoutingStatistics.load(output)
    for warning in statistics.manifest["warnings"]:
        warn(warning)
    manifest = dict(statistics.manifest)
    return {
        "statistics": output,
        "key": statistics.key,
        "domains": manifest["domains"],
        "warnings": manifest["warnings"],
    }


def select_file(
    statistics: Path,
    output: Path,
    *,
    criterion: str,
    hope: Values,
    budget: Values,
    solver: Values,
    mix: Sequence[str],
) -> dict[str, Any]:
    """Write the plan for a statistics file; options as they are typed on the command line."""
    from moeprune.run.select_stage import describe_mix, describe_plan
    from moeprune.selection.options import SelectionOptions
    from moeprune.selection.select import select

    require_writable(output, ".json")
    value = {
        "criterion": _criterion(criterion, hope, int(solver["seed"])),
        "budget": _budget(budget),
        "solver": dict(solver),
        "mix": _mix(mix),
    }
    options = validate(SelectionOptions, value, place="select")
    recorded = RoutingStatistics.load(statistics)
    describe_mix(recorded, options)
    plan = select(recorded, options)
    plan.save(output)
    describe_plan(plan)
    for warning in plan.warnings:
        warn(warning)
    return {"plan": output, **plan.model_dump(mode="json")}


def prune_directory(
    model: str, plan: Path, output: Path, *, overwrite: bool, dry_run: bool, mtp: str
) -> dict[str, Any]:
    """Write the pruned checkpoint of a plan."""
    from moeprune.checkpoint.options import CheckpointOptions
    from moeprune.checkpoint.prune import prune_checkpoint
    from moeprune.console import progress

    options = validate(CheckpointOptions, {"mtp": mtp}, place="prune")
    inputs = Inputs(validate(RunConfig, {"model": {"path": model}}, place="prune"))
    with progress("writing", unit="bytes") as advance:
        report = prune_checkpoint(
            inputs.directory,
            PrunePlan.load(plan),
            output,
            overwrite=overwrite,
            mtp=options.mtp,
            dry_run=dry_run,
            on_progress=advance,
        )
    for warning in [*report.warnings, *report.advice]:
        warn(warning)
    say(f"prune: {report.parameters:,} of {report.parameters_base:,} parameters, {report.bytes / 1e6:,.1f} MB")
    return {"checkpoint": None if dry_run else output, **report.as_json()}


def report_runs(runs: Sequence[Path], *, format: str, together: Path | None = None) -> list[Path]:
    """Write the reports of runs and grids again, or one comparison of runs; returns the files in the wanted format."""
    from moeprune.report.grid_report import write_comparison, write_grid_report
    from moeprune.report.run_report import write_report

    if format not in ("html", "md", "csv"):
        raise InputError(f"--format {format}: one of html, md, csv")
    if together is not None:
        return [write_comparison(runs, together, formats=(format,))]
    written = []
    for directory in runs:
        if (directory / "grid.json").is_file():
            written.append(write_grid_report(directory, formats=(format,)))
        elif not (directory / "run.json").is_file():
            raise InputError(f"{directory}: no run.json or grid.json; give the directory of a run or of a grid")
        else:
            written.append(write_report(directory, formats=(format,)))
    return written


def require_writable(path: Path, suffix: str) -> None:
    """Refuse an output path that cannot become the file, before anything is computed."""
    if path.suffix != suffix:
        raise InputError(f"-o {path}: expected a name that ends in {suffix}")
    if path.is_dir():
        raise InputError(f"-o {path}: is a directory; give a file name")
    parent = existing_parent(path)
    if not parent.is_dir():
        raise InputError(f"-o {path}: {parent} is not a directory")
    if not os.access(parent, os.W_OK):
        raise InputError(f"-o {path}: {parent} cannot be written to; give a name in another directory")


def _criterion(name: str, hope: Values, seed: int) -> dict[str, Any]:
    given = {key: value for key, value in hope.items() if value is not None}
    if name != "hope" and given:
        raise InputError(
            f"--{next(iter(given)).replace('pairwise', 'no-pairwise')} belongs to --criterion hope, not {name}"
        )
    if name.startswith("file:"):
        return {"name": "file", "path": name.removeprefix("file:")}
    return {"name": name, **given} | ({"seed": seed} if name == "random" else {})


def _mix(entries: Sequence[str]) -> dict[str, float]:
    weights: dict[str, float] = {}
    for name, weight in map(name_and_value, entries):
        if name in weights:
            raise InputError(f"--mix {name}: given twice; give each domain one weight")
        weights[name] = _number(weight, f"--mix {name}")
    return weights


def _budget(typed: Values) -> dict[str, Any]:
    """The section `selection.budget` from what was typed: numbers keep their point, which tells shares from counts."""
    numbers = {key: parse_scalar(typed[key]) for key in ("prune", "floor", "ceiling") if typed[key] is not None}
    lists = {"must_keep": _must_keep(typed["must_keep"]), "keep_at_least": _keep_at_least(typed["keep_at_least"])}
    rest = {key: value for key, value in typed.items() if key not in ("prune", "floor", "ceiling")}
    return {**rest, **numbers, **lists}


def _keep_at_least(entries: Sequence[str]) -> float | dict[str, float] | None:
    if not entries:
        return None
    if len(entries) == 1 and "=" not in entries[0]:
        return _number(entries[0], "--keep-at-least")
    return {name: _number(share, f"--keep-at-least {name}") for name, share in map(name_and_value, entries)}


def _must_keep(entries: Sequence[str]) -> dict[str, list[int]]:
    kept: dict[str, list[int]] = {}
    for layer, ids in map(name_and_value, entries):
        if not all(part.strip().isdigit() for part in ids.split(",")):
            raise InputError(f"--must-keep {layer}={ids}: expected LAYER=3,7 with expert ids")
        kept[layer] = kept.get(layer, []) + [int(part) for part in ids.split(",")]
    return kept


def name_and_value(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise InputError(f"{text!r}: expected NAME=VALUE")
    return name, value


def _number(text: str, place: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise InputError(f"{place}: {text!r} is not a number") from error
