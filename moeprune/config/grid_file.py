"""A grid of runs: one base config, axes of labelled patches, the full product; validated before the first run.

    base: ../runs/quickstart.yaml          # relative to this file
    axes:
      method:
        hope: {selection: {criterion: {name: hope}}}
        reap: {selection: {criterion: {name: reap}}}
      ratio:
        p25: {selection: {budget: {prune: 0.25}}}
        p50: {selection: {budget: {prune: 0.5}}}

makes hope-p25, hope-p50, reap-p25 and reap-p50. Patches merge deeply; a section with another `name:` is replaced whole.
"""

import fnmatch
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moeprune.artifacts.errors import InputError
from moeprune.config.load import read_yaml, validate, with_overrides
from moeprune.config.schema import RunConfig

LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.]*")


def is_grid(path: Path) -> bool:
    """Whether a config file describes a grid rather than one run."""
    return "axes" in read_yaml(path)[0]


def load_grid(path: Path, overrides: Sequence[str] = ()) -> dict[str, RunConfig]:
    """Run name -> config, in the order of the axes. Overrides apply to every run.

    Raises InputError for an unknown key, a bad label, a patch that does not validate, and two runs that are the same.
    """
    value, lines = read_yaml(path)
    unknown = sorted(set(value) - {"base", "axes"})
    if unknown:
        line = lines[(unknown[0],)]
        raise InputError(f"{path}:{line}: unknown key {unknown[0]}; a grid has `base:` and `axes:`")
    axes = _axes(value.get("axes"), path)
    base = _base(value.get("base"), path)
    runs: dict[str, RunConfig] = {}
    for labels in itertools.product(*axes.values()):
        name = "-".join(labels)
        patched = base
        for axis, label in zip(axes, labels, strict=True):
            patched = merged(patched, axes[axis][label])
        runs[name] = validate(RunConfig, with_overrides(patched, overrides), place=f"{path} run {name}")
    _require_different(runs, path)
    return runs


def only(runs: Mapping[str, RunConfig], pattern: str | None) -> dict[str, RunConfig]:
    """The runs whose name matches the shell pattern. Raises InputError when none does."""
    chosen = {name: config for name, config in runs.items() if pattern is None or fnmatch.fnmatchcase(name, pattern)}
    if not chosen:
        raise InputError(f"--only {pattern}: matches none of {', '.join(runs)}")
    return chosen


def merged(value: Any, patch: Any) -> Any:
    """`value` with `patch` laid over it; a section that changes its `name` keeps nothing of the old one."""
    if not isinstance(value, Mapping) or not isinstance(patch, Mapping):
        return patch
    if "name" in patch and patch["name"] != value.get("name"):
        return dict(patch)
    return {**value, **{key: merged(value.get(key), child) for key, child in patch.items()}}


def _base(base: Any, path: Path) -> dict[str, Any]:
    if base is None:
        return {}
    if not isinstance(base, str):
        raise InputError(f"{path}: base: expected the path of a run's config, found {type(base).__name__}")
    return read_yaml(path.parent / base)[0]


def _axes(axes: Any, path: Path) -> dict[str, dict[str, Any]]:
    if not isinstance(axes, Mapping) or not axes:
        raise InputError(f"{path}: axes: expected a mapping of axis -> {{label: patch}}")
    for axis, patches in axes.items():
        if not isinstance(patches, Mapping) or not patches:
            raise InputError(f"{path}: axes.{axis}: expected a mapping of label -> patch")
        for label, patch in patches.items():
            if not LABEL.fullmatch(label):
                raise InputError(
                    f"{path}: axes.{axis}: label {label!r} goes into the run's name; use letters, digits, _ and ."
                )
            if patch is not None and not isinstance(patch, Mapping):
                raise InputError(f"{path}: axes.{axis}.{label}: expected a patch such as {{selection: ...}}")
    return {axis: {label: patch or {} for label, patch in patches.items()} for axis, patches in axes.items()}


def _require_different(runs: Mapping[str, RunConfig], path: Path) -> None:
    seen: dict[str, str] = {}
    for name, config in runs.items():
        text = _meaning(config)
        if text in seen:
            raise InputError(
                f"{path}: runs {seen[text]} and {name} are the same config; remove one label (a domain that "
                "selection.mix does not name has weight 1; 0 leaves it out)"
            )
        seen[text] = name


def _meaning(config: RunConfig) -> str:
    """The config as text, with the weight of every domain in the mix, named or not."""
    weights = {domain.name: config.selection.mix.get(domain.name, 1.0) for domain in config.calibration.domains}
    selection = config.selection.model_copy(update={"mix": config.selection.mix | weights})
    return config.model_copy(update={"selection": selection}).model_dump_json()
