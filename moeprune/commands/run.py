"""`moeprune run` and `moeprune grid`: all stages of one config, or of every run of a grid."""

from pathlib import Path
from typing import Annotated

import typer

from moeprune.commands.arguments import Json, Overrides, finish, start


def run(
    config: Path,
    overrides: Overrides = None,
    until: Annotated[
        str | None, typer.Option(help="Stop after this stage: record, select, prune, dense, evaluate.")
    ] = None,
    redo: Annotated[str | None, typer.Option(help="Run this stage and those after it again.")] = None,
    output: Annotated[Path, typer.Option(help="Directory of run directories.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """All stages of one run: record, select, prune, evaluate, report."""
    start(as_json)
    from moeprune.run.pipeline import run_file

    outcome = run_file(config, overrides or [], output=output, until=until, redo=redo)
    summary = {
        "run": outcome.directory,
        "written": outcome.written,
        "metrics": outcome.metrics,
        "warnings": outcome.warnings,
    }
    finish(summary, outcome.written, as_json=as_json)


def grid(
    config: Path,
    overrides: Overrides = None,
    only: Annotated[str | None, typer.Option(help="Runs whose name matches, e.g. 'hope-*'.")] = None,
    workers: Annotated[int, typer.Option(help="Processes on this machine.")] = 1,
    ray: Annotated[str | None, typer.Option(help="A Ray cluster's HOST:PORT, or local; needs the extra `ray`.")] = None,
    output: Annotated[Path, typer.Option(help="Directory of grid directories.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """Every run of a grid, resumed run by run, and their comparison."""
    start(as_json)
    from moeprune.run.grid import run_grid

    outcome = run_grid(config, overrides or [], output=output, pattern=only, workers=workers, ray=ray)
    summary = {"grid": outcome.directory, "done": outcome.done, "failed": outcome.failed, "report": outcome.report}
    finish(summary, outcome.report, as_json=as_json)
    if outcome.failed:
        raise typer.Exit(1)
