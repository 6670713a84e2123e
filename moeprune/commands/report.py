"""`moeprune report`: reports of runs and grids written again, or one comparison of several runs."""

from pathlib import Path
from typing import Annotated

import typer

from moeprune.artifacts.errors import InputError
from moeprune.commands.arguments import Json, finish, start


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...")],
    format: Annotated[str, typer.Option("--format", help="html, md or csv.")] = "html",
    together: Annotated[Path | None, typer.Option(help="Compare the runs in one report, in this directory.")] = None,
    as_json: Json = False,
) -> None:
    """Write the report of runs and grids again from what is on disk, or one that compares runs."""
    start(as_json)
    if format not in ("html", "md", "csv"):
        raise InputError(f"--format {format}: one of html, md, csv")
    from moeprune.report.grid_report import write_comparison, write_grid_report
    from moeprune.report.run_report import write_report

    written = []
    if together is not None:
        written.append(write_comparison(runs, together, formats=(format,)))
    else:
        for directory in runs:
            if (directory / "grid.json").is_file():
                written.append(write_grid_report(directory, formats=(format,)))
            elif (directory / "run.json").is_file():
                written.append(write_report(directory, formats=(format,)))
            else:
                raise InputError(f"{directory}: no run.json or grid.json; give the directory of a run or of a grid")
    for path in written[:-1]:
        print(path)
    finish({"reports": written}, written[-1], as_json=as_json)
