"""Metrics: one flat level of finite numbers, `metrics.json`. The names are listed in README.md."""

import math
from collections.abc import Mapping
from pathlib import Path

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import read_json, write_json


def save_metrics(path: Path, metrics: Mapping[str, float]) -> None:
    """Raises ValueError for a value that is not a finite number: a metric that could not be measured is left out."""
    for name, value in metrics.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"metric {name} is {value!r}, not a finite number")
    write_json(path, dict(sorted(metrics.items())))


def load_metrics(path: Path) -> dict[str, float]:
    metrics = read_json(path)
    if not isinstance(metrics, dict) or not all(type(value) in (int, float) for value in metrics.values()):
        raise InputError(f"{path}: not a metrics file; expected one flat JSON object of numbers")
    return {str(name): float(value) for name, value in metrics.items()}
