"""What a run directory holds, read back for reports: whatever is there, and words for whatever is not."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import load_metrics, read_json
from moeprune.artifacts.plan import PrunePlan
from moeprune.artifacts.run import STAGES
from moeprune.artifacts.statistics import LayerStatistics, RoutingStatistics
from moeprune.report.style import MethodStyle, interval, method_names, method_style, share

TOTALS = ("mean", "worst")  # fidelity/kl/<these> are over domains


@dataclass(frozen=True)
class Measure:
    """One metric: its value, its interval and the unpruned model's value, where they were measured."""

    value: float
    low: float | None = None
    high: float | None = None
    base: float | None = None

    def __str__(self) -> str:
        return interval(self.value, self.low, self.high)

    @property
    def as_share(self) -> str:
        return share(self.value, self.low, self.high)

    def overlaps(self, other: "Measure") -> bool:
        """Whether the two intervals share a value; a measure without an interval is a point."""
        low, high = (self.value if end is None else end for end in (self.low, self.high))
        other_low, other_high = (other.value if end is None else end for end in (other.low, other.high))
        return low <= other_high and other_low <= high


@dataclass(frozen=True)
class Method:
    """One criterion with its plan and its own metrics; `label` is empty for the run's own."""

    label: str
    name: str
    style: MethodStyle
    plan: PrunePlan
    metrics: Mapping[str, float]

    def measure(self, name: str) -> Measure | None:
        return measure(self.metrics, name)


@dataclass(frozen=True)
class RunRecord:
    """One run directory. Parts that are not there are None or empty; `missing` says which and why."""

    directory: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    config_text: str = ""
    run: Mapping[str, Any] = field(default_factory=dict)
    plan: PrunePlan | None = None
    baselines: Mapping[str, PrunePlan] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    statistics: RoutingStatistics | None = None
    missing: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return str(self.run.get("name") or self.directory.name)

    @property
    def stages(self) -> dict[str, Mapping[str, Any]]:
        """Entries of the finished stages, in the order in which stages run."""
        return {name: self.run["stages"][name] for name in STAGES if name in self.run.get("stages", {})}

    @property
    def recorded(self) -> Mapping[str, int]:
        """Evaluated domain -> how many of its trajectories were calibration's: those are not held out."""
        counts: Mapping[str, int] = self.stages.get("evaluate", {}).get("recorded") or {}
        return counts

    def section(self, *keys: str) -> Any:
        """The config value under these keys, or None."""
        value: Any = self.config
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    @cached_property
    def methods(self) -> list[Method]:
        """The run's own method, then its baselines in the order of the config."""
        if self.plan is None:
            return []
        plans = {"": self.plan, **self.baselines}
        names = method_names([plan.criterion for plan in plans.values()])
        own = {name: value for name, value in self.metrics.items() if not name.startswith("baseline/")}
        return [
            Method(label, name, method_style(plan.criterion), plan, _under(self.metrics, label) if label else own)
            for (label, plan), name in zip(plans.items(), names, strict=True)
        ]

    @cached_property
    def domains(self) -> list[str]:
        """Evaluated domains, the one with the run's highest KL first."""
        return evaluated_domains(self.metrics)

    @cached_property
    def calibrated(self) -> set[str]:
        """Evaluated domains that were also calibrated on, by name or by path, with a weight above 0."""
        known = self.statistics.manifest["domains"] if self.statistics else {}
        named = {str(domain.get("name")): domain for domain in self.section("calibration", "domains") or []}
        mix = self.plan.mix if self.plan else {}
        used = {name: domain for name, domain in {**named, **known}.items() if mix.get(name, 1.0) > 0}
        paths = {domain.get("path") for domain in used.values()}
        evaluated = self.section("evaluation", "domains") or []
        return set(used) | {str(domain.get("name")) for domain in evaluated if domain.get("path") in paths}

    @cached_property
    def tasks(self) -> list[str]:
        """Names of the measured tasks, without their parts (`agent.lookup`)."""
        return [name for name in task_names(self.metrics) if "." not in name]

    @cached_property
    def sizes(self) -> dict[str, float]:
        """Size metrics; those of the stage that made the checkpoint when the run was not evaluated."""
        entry = self.stages.get("dense") or self.stages.get("prune", {})
        sizes: dict[str, float] = {}
        for name in ("parameters", "bytes"):
            if entry.get(name) is not None and entry.get(f"{name}_base"):
                sizes |= {f"size/{name}": float(entry[name]), f"size/{name}/base": float(entry[f"{name}_base"])}
        return sizes | {name: value for name, value in self.metrics.items() if name.startswith("size/")}

    @property
    def why_unmeasured(self) -> str:
        """Why there is no metric, in words."""
        if "evaluate" in self.stages:
            return "the evaluation holds no domain and no task"
        return f"the run stopped after `{list(self.stages)[-1]}`" if self.stages else "no stage of the run is done"

    @cached_property
    def mixed(self) -> dict[str, LayerStatistics]:
        """Layer name -> the statistics the plan was selected from; empty when either is missing."""
        if self.statistics is None or self.plan is None:
            return {}
        if {layer.name for layer in self.statistics.layers} != set(self.plan.kept):
            return {}
        weights = {domain: weight for domain, weight in self.plan.mix.items() if domain in self.statistics.domains}
        return self.statistics.mix(weights)

    @cached_property
    def dead(self) -> dict[str, list[int]]:
        """Layer name -> experts that no calibration token was routed to."""
        unrouted = {name: [i for i, n in enumerate(sums.count) if not n > 0] for name, sums in self.mixed.items()}
        return {name: experts for name, experts in unrouted.items() if experts}


def evaluated_domains(metrics: Mapping[str, float]) -> list[str]:
    """Domain names among the fidelity metrics, the highest KL first; without KL by the rise of the NLL."""
    names: dict[str, float] = {}
    for kind in ("nll", "kl"):
        for name, value in metrics.items():
            parts = name.split("/")
            if parts[:2] == ["fidelity", kind] and len(parts) == 3 and parts[2] not in TOTALS:
                names[parts[2]] = value - metrics.get(f"{name}/base", 0.0)
    return sorted(names, key=lambda domain: (-names[domain], domain))


def task_names(metrics: Mapping[str, float]) -> list[str]:
    """Names under `task/accuracy/`, with their parts (`agent`, `agent.lookup`)."""
    names = [name for name in metrics if name.startswith("task/accuracy/") and name.count("/") == 2]
    return sorted(name.removeprefix("task/accuracy/") for name in names)


def measure(metrics: Mapping[str, float], name: str) -> Measure | None:
    """The metric with its interval and base, or None when it was not measured."""
    if name not in metrics:
        return None
    low, high = (metrics.get(f"{name}/ci_{end}", metrics.get(f"{name}/{end}")) for end in ("low", "high"))
    return Measure(metrics[name], low, high, metrics.get(f"{name}/base"))


def perplexity(metrics: Mapping[str, float], domain: str) -> Measure | None:
    """The measured perplexity, or that of the measured NLL."""
    measured = measure(metrics, f"fidelity/perplexity/{domain}")
    nll = measure(metrics, f"fidelity/nll/{domain}")
    if measured or nll is None:
        return measured
    ends = [None if end is None else math.exp(end) for end in (nll.low, nll.high, nll.base)]
    return Measure(math.exp(nll.value), *ends)


def read_run(
    directory: Path, *, load_statistics: Callable[[Path], RoutingStatistics] = RoutingStatistics.load
) -> RunRecord:
    """Everything a run directory holds. Raises InputError when it holds neither config.yaml nor run.json.

    Runs of a grid share recordings: pass a `load_statistics` that remembers.
    """
    directory = Path(directory)
    if not (directory / "config.yaml").is_file() and not (directory / "run.json").is_file():
        raise InputError(f"{directory}: not a run directory (no config.yaml, no run.json); give one that `run` made")
    reader = _Reader(directory)
    text = reader.take("config.yaml", lambda path: path.read_text(encoding="utf-8")) or ""
    run = reader.take("run.json", read_json) or {}
    statistics_path = run.get("stages", {}).get("record", {}).get("statistics")
    selected = run.get("stages", {}).get("select", {})
    written = sorted(path.parent.name for path in directory.glob("baselines/*/plan.json"))
    paths = {label: f"baselines/{label}/plan.json" for label in selected.get("baselines", written)}
    baselines = {label: reader.left_by(run, "select", path, PrunePlan.load) for label, path in paths.items()}
    return RunRecord(
        directory=directory,
        config=_yaml(text),
        config_text=text,
        run=run,
        plan=reader.left_by(run, "select", "plan.json", PrunePlan.load),
        baselines={label: plan for label, plan in baselines.items() if plan is not None},
        metrics=reader.left_by(run, "evaluate", "metrics.json", load_metrics) or {},
        statistics=reader.take(statistics_path, load_statistics) if statistics_path else None,
        missing=tuple(reader.missing),
    )


class _Reader:
    """Reads files of one directory and keeps a sentence for each that is damaged or gone."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.missing: list[str] = []

    def take(self, name: str, load: Any) -> Any:
        """The loaded file, or None."""
        path = self.directory / name
        if not path.is_file():
            self.missing.append(f"{name} is not there")
            return None
        try:
            return load(path)
        except (InputError, UnicodeDecodeError, OSError) as error:
            self.missing.append(f"{name} cannot be read: {error}")
            return None

    def left_by(self, run: Mapping[str, Any], stage: str, name: str, load: Any) -> Any:
        """The loaded file of a stage that is done, or None: what an earlier plan or data left behind is not read."""
        if run and stage not in run.get("stages", {}) and (self.directory / name).is_file():
            self.missing.append(f"{name} is of an earlier call, and `{stage}` is not done since")
            return None
        return self.take(name, load)


def _yaml(text: str) -> Mapping[str, Any]:
    from ruamel.yaml import YAML, YAMLError

    try:
        value = YAML(typ="safe", pure=True).load(text)
    except YAMLError:
        return {}
    return value if isinstance(value, Mapping) else {}


def _under(metrics: Mapping[str, float], label: str) -> dict[str, float]:
    start = f"baseline/{label}/"
    return {name.removeprefix(start): value for name, value in metrics.items() if name.startswith(start)}
