"""Files that are either whole or absent (written beside, flushed to disk, renamed), and `metrics.json`."""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moeprune.artifacts.errors import InputError


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; renamed over `path` when the block ends well, removed when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield beside
        with beside.open("rb") as written:
            os.fsync(written.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def existing_parent(path: Path) -> Path:
    """The nearest folder above `path` that exists."""
    return next(parent for parent in path.absolute().parents if parent.exists())


def write_text(path: Path, text: str) -> None:
    with whole_file(path) as beside:
        beside.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Indented JSON with a final newline; NaN and infinity are refused, since other readers cannot parse them."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def sha256(path: Path) -> str:
    """Of the file's bytes, as hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> Any:
    """The parsed file. Raises InputError when it is missing, empty or not JSON."""
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not a JSON file ({error})") from error


def save_metrics(path: Path, metrics: Mapping[str, float]) -> None:
    """One flat level of numbers, sorted by name.

    Raises ValueError for a value that is not a finite number: a metric that could not be measured is left out.
    """
    for name, value in metrics.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"metric {name} is {value!r}, not a finite number")
    write_json(path, dict(sorted(metrics.items())))


def load_metrics(path: Path) -> dict[str, float]:
    metrics = read_json(path)
    if not isinstance(metrics, dict) or not all(type(value) in (int, float) for value in metrics.values()):
        raise InputError(f"{path}: not a metrics file; expected one flat JSON object of numbers")
    return {str(name): float(value) for name, value in metrics.items()}
