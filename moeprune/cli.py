"""The command line: joins the verbs of commands/ and turns errors into exit codes.

A verb's module imports torch and the like inside its functions, so that `moeprune --help` answers at once.
"""

import sys
import traceback

import typer

from moeprune.artifacts.errors import InputError, OutsideError
from moeprune.commands.check import check
from moeprune.commands.compress import compress
from moeprune.commands.evaluate import evaluate
from moeprune.commands.export import export
from moeprune.commands.generate import generate
from moeprune.commands.inspect import families, inspect
from moeprune.commands.prune import prune
from moeprune.commands.record import record
from moeprune.commands.report import report
from moeprune.commands.run import grid, run
from moeprune.commands.select import select
from moeprune.commands.verify import verify

VERBS = (
    *(run, grid, check, record, select, prune, evaluate, compress),
    *(generate, verify, export, inspect, families, report),
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Prune experts from Mixture-of-Experts language models, and trust the result.",
)
for verb in VERBS:
    app.command()(verb)


def main() -> None:
    """Entry point. Exit codes: 0 done, 1 failed, 2 bad input."""
    try:
        app()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OutsideError as error:
        print(f"failed: {error}", file=sys.stderr)
        sys.exit(1)
    except SystemExit as end:
        if end.code == 130:  # what typer makes of Ctrl-C
            print("stopped; the same command goes on where this one was", file=sys.stderr)
        raise
    except Exception as error:  # noqa: BLE001 (the last stop: say it in one line under the trace, and exit 1)
        traceback.print_exc()
        print(f"failed: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
