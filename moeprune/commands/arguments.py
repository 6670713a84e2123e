"""What the verbs share: argument types, NAME=VALUE on the command line, the file to write, the last line printed."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import existing_parent
from moeprune.console import speak

if TYPE_CHECKING:
    from moeprune.run.opened import Opened

Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, e.g. selection.budget.prune=0.25")]
Json = Annotated[bool, typer.Option("--json", help="Print a machine-readable summary instead.")]
ModelPath = Annotated[str, typer.Argument(help="A checkpoint directory, a hub name, or `reference`.")]
Checkpoint = Annotated[Path, typer.Option("-o", "--output", help="The directory of the new checkpoint.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a directory that is not empty.")]

Values = Mapping[str, Any]


def start(as_json: bool) -> None:
    """Send the package's lines to standard error; with --json warnings alone."""
    speak(quiet=as_json)


def finish(summary: Values, written: Path | None, *, as_json: bool) -> None:
    """The last line on standard output: the summary as JSON, or the path of what was written."""
    if as_json:
        print(json.dumps(summary, default=str))
    elif written is not None:
        print(written)


def name_and_value(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise InputError(f"{text!r}: expected NAME=VALUE")
    return name, value


def number(text: str, place: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise InputError(f"{place}: {text!r} is not a number") from error


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


def open_model(path: str) -> "Opened":
    """The model at a path, with nothing read yet."""
    from moeprune.models.options import ModelOptions
    from moeprune.run.opened import Opened

    return Opened(ModelOptions(path=path))
