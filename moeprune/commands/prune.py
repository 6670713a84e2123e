"""`moeprune prune`: the checkpoint of a plan."""

from pathlib import Path
from typing import Annotated

import typer

from moeprune.commands.arguments import Checkpoint, Json, ModelPath, Overwrite, finish, open_model, start
from moeprune.console import progress, say, warn


def prune(
    model: ModelPath,
    plan: Path,
    output: Checkpoint,
    overwrite: Overwrite = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and count, write nothing.")] = False,
    mtp: Annotated[str, typer.Option(help="Multi-token-prediction layers: refuse or drop.")] = "refuse",
    as_json: Json = False,
) -> None:
    """A checkpoint with the kept experts only, as stock engines load it."""
    start(as_json)
    from moeprune.artifacts.plan import PrunePlan
    from moeprune.checkpoint.options import CheckpointOptions
    from moeprune.checkpoint.prune import prune_checkpoint
    from moeprune.config.load import validate

    options = validate(CheckpointOptions, {"mtp": mtp}, place="prune")
    opened = open_model(model)
    with progress("writing", unit="bytes") as advance:
        report = prune_checkpoint(
            opened.directory,
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
    written = None if dry_run else output
    finish({"checkpoint": written, **report.as_json()}, written, as_json=as_json)
