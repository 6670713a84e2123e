"""What a grid of runs holds: every run with its state, the config fields in which runs differ, and methods apart."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import read_json
from moeprune.artifacts.run import IDENTITY, keyed
from moeprune.artifacts.statistics import RoutingStatistics
from moeprune.report.run_record import RunRecord, evaluated_domains, read_run, task_names
from moeprune.report.style import MethodStyle, method_names, method_style, percent

CRITERION = "selection.criterion."
CHOICES = (CRITERION, "selection.solver.")  # sections whose options depend on their name
PRUNE = "selection.budget.prune"
ABSENT = "–"


@dataclass(frozen=True)
class GridRun:
    """One run of a grid. `status`: done, unfinished (some stages), failed (it raised), missing (never started)."""

    name: str
    status: str
    reason: str = ""
    record: RunRecord | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """The run's own metrics; those of baselines measured beside it are left to its own report."""
        metrics = self.record.metrics if self.record else {}
        return {name: value for name, value in metrics.items() if not name.startswith("baseline/")}

    @cached_property
    def criterion(self) -> dict[str, Any]:
        """The criterion's options without its seed: runs that differ in a seed alone repeat the same method."""
        if self.record is None:
            return {}
        options = self.record.plan.criterion if self.record.plan else self.record.section("selection", "criterion")
        return {key: value for key, value in (options or {}).items() if key != "seed"}

    @property
    def ratio(self) -> float | None:
        """The share of experts that was pruned, over all layers."""
        if self.record is None or self.record.plan is None:
            return None
        plans = self.record.plan.layers
        return sum(len(layer.pruned) for layer in plans) / sum(layer.num_experts for layer in plans)

    @cached_property
    def fields(self) -> dict[str, str]:
        """Dotted config key -> value as text, of the sections that decide results."""
        config = self.record.config if self.record else {}
        return {k: v for section in IDENTITY if section in config for k, v in _flat(config[section], section)}


@dataclass(frozen=True)
class Grid:
    """All runs of a grid, in its order."""

    name: str
    runs: tuple[GridRun, ...]

    @cached_property
    def done(self) -> list[GridRun]:
        return [run for run in self.runs if run.status == "done"]

    @cached_property
    def differing(self) -> list[str]:
        """Dotted config keys in which runs differ, the criterion first, then the ratio."""
        known = [run.fields for run in self.runs if run.fields]
        keys = list(dict.fromkeys(key for fields in known for key in fields))
        keys = [key for key in keys if _differs(key, [fields.get(key, ABSENT) for fields in known])]
        return sorted(keys, key=lambda key: (not key.startswith(CRITERION), key != PRUNE))

    @cached_property
    def names(self) -> dict[str, str]:
        """Run name -> its method's name."""
        unique = {repr(sorted(run.criterion.items())): run.criterion for run in self.runs if run.criterion}
        shown = dict(zip(unique, method_names(list(unique.values())), strict=True))
        return {run.name: shown[repr(sorted(run.criterion.items()))] for run in self.runs if run.criterion}

    @cached_property
    def methods(self) -> dict[str, MethodStyle]:
        """Method name -> style, of the runs that are done, in the grid's order."""
        return {self.names[run.name]: method_style(run.criterion) for run in self.done}

    @cached_property
    def domains(self) -> list[str]:
        """Evaluated domains, the one with the highest mean KL first."""
        evaluated = {domain for run in self.done for domain in evaluated_domains(run.metrics)}
        means = {}
        for domain in evaluated:
            values = [run.metrics.get(f"fidelity/kl/{domain}") for run in self.done]
            known = [value for value in values if value is not None]
            means[domain] = float(np.mean(known)) if known else -1.0
        return sorted(evaluated, key=lambda domain: (-means[domain], domain))

    @cached_property
    def calibrated(self) -> list[str]:
        """Evaluated domains that every run was also calibrated on."""
        return [d for d in self.domains if all(run.record and d in run.record.calibrated for run in self.done)]

    @cached_property
    def tasks(self) -> list[str]:
        return sorted({name for run in self.done for name in task_names(run.metrics) if "." not in name})

    def condition(self, run: GridRun) -> tuple[tuple[str, str], ...]:
        """What a run has in common with the runs of other methods it can be compared with."""
        return tuple((key, run.fields.get(key, ABSENT)) for key in self.differing if not key.startswith(CRITERION))

    def setting(self, run: GridRun) -> str:
        """The condition without the ratio and without seeds, in words; empty when runs differ in nothing else."""
        rest = [(k, v) for k, v in self.condition(run) if k != PRUNE and not k.endswith("seed")]
        return ", ".join(f"{short_keys(self.differing)[key]} {value}" for key, value in rest)

    def groups(self) -> dict[tuple[str, str, float], list[GridRun]]:
        """(method, setting, ratio) -> the runs that repeat it with other seeds."""
        groups: dict[tuple[str, str, float], list[GridRun]] = {}
        for run in self.done:
            ratio = run.ratio
            if ratio is not None:
                groups.setdefault((self.names[run.name], self.setting(run), round(ratio, 6)), []).append(run)
        return groups

    def blocks(self) -> list[dict[str, list[GridRun]]]:
        """One block per condition that every method was measured under: method -> runs."""
        conditions: dict[tuple[tuple[str, str], ...], dict[str, list[GridRun]]] = {}
        for run in self.done:
            conditions.setdefault(self.condition(run), {}).setdefault(self.names[run.name], []).append(run)
        return [block for block in conditions.values() if set(block) == set(self.methods)]


def _differs(key: str, values: Sequence[str]) -> bool:
    """Whether a field tells runs apart. An option that only some criteria or solvers have does not by being there."""
    distinct = set(values)
    if key.startswith(CHOICES) and not key.endswith(".name"):
        distinct -= {ABSENT}
    return len(distinct) > 1


def short_keys(keys: Sequence[str]) -> dict[str, str]:
    """Dotted key -> its shortest ending that no other key has; a section's name is called like the section."""
    short = {}
    shown = [key.removesuffix(".name") for key in keys]
    for key, name in zip(keys, shown):
        parts = name.split(".")
        endings = [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]
        unique = [e for e in endings if sum(other == e or other.endswith(f".{e}") for other in shown) == 1]
        short[key] = unique[0] if unique else key
    return short


def group_label(group: tuple[str, str, float]) -> str:
    """`HOPE, 25 %, domains.python absent`."""
    method, setting, ratio = group
    return ", ".join(
        filter(None, [method, percent(ratio, places=0 if round(100 * ratio, 6).is_integer() else 1), setting])
    )


def read_grid(directory: Path) -> Grid:
    """The runs that grid.json names, present or not; every run in the folder where grid.json is missing.

    grid.json, if there: {"runs": [names in order] or {name: {...}}, "failed": {name: why}}.
    Raises InputError when the directory holds no run at all.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise InputError(f"{directory}: no such directory; give the directory of a grid")
    listed = read_json(directory / "grid.json") if (directory / "grid.json").is_file() else {}
    failed = {str(name): str(why) for name, why in dict(listed.get("failed", {})).items()}
    present = {path.name: path for path in sorted(directory.iterdir()) if _is_run(path)}
    # A run whose label was removed from the axes is still in the folder, but no longer a run of this grid.
    names = dict.fromkeys([*map(str, listed.get("runs", present)), *failed])
    if not names:
        raise InputError(f"{directory}: holds no run (a folder with config.yaml); give the directory of a grid")
    return Grid(directory.name, tuple(_read_all([(name, present.get(name)) for name in names], failed)))


def read_runs(directories: Sequence[Path]) -> Grid:
    """Runs from anywhere, compared as if they were a grid. Raises InputError for a folder that is no run."""
    for path in directories:
        if not _is_run(Path(path)):
            raise InputError(f"{path}: not a run directory (no config.yaml, no run.json); give one that `run` made")
    paths = [Path(path).resolve() for path in directories]
    for path, resolved in zip(directories, paths):
        if paths.count(resolved) > 1:
            raise InputError(f"{path}: named twice; give each run once")
    names = ["/".join(path.parts[-depth:]) for path, depth in zip(paths, _depths(paths))]
    return Grid("comparison", tuple(_read_all(list(zip(names, map(Path, directories))), {})))


def _depths(paths: Sequence[Path]) -> list[int]:
    """How many last parts of each path it takes to tell it from the others."""
    return [
        next(
            depth
            for depth in range(1, len(path.parts) + 1)
            if all(path.parts[-depth:] != other.parts[-depth:] for other in paths if other != path)
        )
        for path in paths
    ]


def _read_all(runs: Iterable[tuple[str, Path | None]], failed: Mapping[str, str]) -> list[GridRun]:
    @cache
    def load(path: Path) -> RoutingStatistics:
        return RoutingStatistics.load(path)

    return [_read(name, path, failed, lambda file: load(file.resolve())) for name, path in runs]


def _read(name: str, path: Path | None, failed: Mapping[str, str], load: Any) -> GridRun:
    if path is None:
        return GridRun(name, "failed", failed[name]) if name in failed else GridRun(name, "missing", "never started")
    record = read_run(path, load_statistics=load)
    if name in failed:  # whatever an earlier call measured
        return GridRun(name, "failed", failed[name], replace(record, metrics={}))
    if record.metrics:
        return GridRun(name, "done", "", record)
    reason = str(record.run.get("error") or "")
    damaged = [sentence for sentence in record.missing if "cannot be read" in sentence]
    if reason or damaged:
        return GridRun(name, "failed", reason or "; ".join(damaged), record)
    return GridRun(name, "unfinished", record.why_unmeasured, record)


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file() or (path / "run.json").is_file()


def _flat(value: Any, prefix: str) -> list[tuple[str, str]]:
    """(dotted key, text) of every leaf; items of a list are named by their `name` where they have one."""
    if isinstance(value, Mapping):
        return [leaf for key, child in value.items() for leaf in _flat(child, f"{prefix}.{key}")]
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return [
            leaf
            for key, item in keyed(value).items()
            for leaf in _flat({k: v for k, v in item.items() if k != "name" or v != key}, f"{prefix}.{key}")
        ]
    if isinstance(value, list):
        return [(prefix, ", ".join(map(str, value)) or "none")]
    return [(prefix, "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value))]
