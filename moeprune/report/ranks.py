"""Numbers over the runs of a grid: ranks with intervals, agreement of sets, what objectives predict."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import ValidationError

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.plan import PrunePlan
from moeprune.report.grid_record import Grid, GridRun
from moeprune.report.results import jaccard
from moeprune.report.run_record import Measure, evaluated_domains, measure
from moeprune.selection.criteria.criterion import gather
from moeprune.selection.objective import Objective
from moeprune.selection.options import SelectionOptions

RESAMPLES = 2000
FEW = 5  # conditions below which a bootstrap over them is likely too narrow to call a lead
TINY = 1e-12  # below what a KL in float32 means anything; keeps logarithms finite
COMMON = {"name": "hope", "product": "norms", "normalise": "all_tokens"}  # the objective all runs are put under
OBJECTIVES = ("HOPE's objective, for every set", "each method's own objective")  # as the figure names them


@dataclass(frozen=True)
class Score:
    """A method's mean over conditions; `level` when the paired difference from the best method may be 0."""

    measure: Measure
    best: bool = False
    level: bool = False


@dataclass(frozen=True)
class Standing:
    """One method over all conditions that every method was measured under."""

    method: str
    rank: Score  # mean rank by KL over conditions and domains, 1 is best
    rank_seen: Score | None  # the same over the domains that calibration saw, where that is some of them
    wins: int  # (condition, domain) pairs in which its KL is the lowest
    relative: Score  # KL divided by the lowest of the condition and domain, geometric mean
    relative_worst: Score  # the same for the KL of the worst domain
    accuracies: Mapping[str, Score | None]


@dataclass(frozen=True)
class Standings:
    """Methods by mean rank, best first, and what they were compared on."""

    methods: tuple[Standing, ...]
    conditions: int
    domains: int
    seen: tuple[str, ...]  # the domains that calibration saw, where that is some of them
    left_out: int  # conditions that not every method was measured under


def standings(grid: Grid, *, seed: int = 0) -> Standings | None:
    """Methods ranked by KL; 95 % bootstrap intervals over conditions where there are at least two.

    None when no condition holds a KL of two methods or more.
    """
    from scipy.stats import rankdata

    names, blocks, domains = list(grid.methods), grid.blocks(), grid.domains
    if len(names) < 2 or not blocks or not domains:
        return None
    kls = np.array([[[_mean(block[m], f"fidelity/kl/{d}") for d in domains] for m in names] for block in blocks])
    complete = np.isfinite(kls).all(axis=(1, 2))
    kls, blocks = np.maximum(kls[complete], TINY), [block for block, whole in zip(blocks, complete) if whole]
    if not len(kls):
        return None
    draws = _draws(len(blocks), seed)
    worst = kls.max(axis=2)
    each = rankdata(kls, axis=1)  # (conditions, methods, domains); 1 for the lowest, equal values share their mean rank
    seen = [domains.index(domain) for domain in grid.calibrated]
    if len(seen) == len(domains):
        seen = []
    seen_ranks = _scores(each[:, :, seen].mean(axis=2), draws) if seen else None
    excess = np.log(kls / kls.min(axis=1, keepdims=True)).mean(axis=2)
    excess_worst = np.log(worst / worst.min(axis=1, keepdims=True))
    ranks = _scores(each.mean(axis=2), draws)
    relative = _scores(excess, draws, as_ratio=True)
    relative_worst = _scores(excess_worst, draws, as_ratio=True)
    tasks = {task: _task_scores(blocks, names, task, draws) for task in grid.tasks}
    lowest = (kls == kls.min(axis=1, keepdims=True)).sum(axis=(0, 2))
    methods = [
        Standing(
            method=name,
            rank=ranks[i],
            rank_seen=seen_ranks[i] if seen_ranks else None,
            wins=int(lowest[i]),
            relative=relative[i],
            relative_worst=relative_worst[i],
            accuracies={task: scores[i] if scores else None for task, scores in tasks.items()},
        )
        for i, name in enumerate(names)
    ]
    methods.sort(key=lambda standing: standing.rank.measure.value)
    left_out = len({grid.condition(run) for run in grid.done}) - len(blocks)
    return Standings(tuple(methods), len(blocks), len(domains), tuple(domains[i] for i in seen), left_out)


def _task_scores(
    blocks: Sequence[Mapping[str, Sequence[GridRun]]], names: Sequence[str], task: str, draws: np.ndarray | None
) -> list[Score] | None:
    values = np.array([[_mean(block[name], f"task/accuracy/{task}") for name in names] for block in blocks])
    return _scores(-values, draws, negated=True) if np.isfinite(values).all() else None


def _mean(runs: Sequence[GridRun], name: str) -> float:
    return float(np.mean([run.metrics.get(name, math.nan) for run in runs]))


def _draws(conditions: int, seed: int) -> np.ndarray | None:
    """Indices (resamples, conditions), the same for every method so that comparisons are paired."""
    if conditions < 2:
        return None
    return np.random.default_rng(seed).integers(conditions, size=(RESAMPLES, conditions))


def _scores(
    values: np.ndarray, draws: np.ndarray | None, *, as_ratio: bool = False, negated: bool = False
) -> list[Score]:
    """Means over conditions of values (conditions, methods), the lower the better, with intervals and ties.

    as_ratio: values are logarithms and are shown as their exponential; negated: the higher the original the better.
    """
    means = values.mean(axis=0)
    resampled = None if draws is None else values[draws].mean(axis=1)  # (resamples, methods)
    best = int(means.argmin())
    scores = []
    for index, mean in enumerate(means):
        ends = (mean, mean) if resampled is None else np.quantile(resampled[:, index], [0.025, 0.975])
        shown = [math.exp(v) if as_ratio else 0.0 - v if negated else v for v in (mean, *ends)]
        low, high = (None, None) if resampled is None else sorted(map(float, shown[1:]))
        level = resampled is not None and float(np.quantile(resampled[:, index] - resampled[:, best], 0.025)) <= 0
        top = bool(mean == means[best])
        scores.append(Score(Measure(float(shown[0]), low, high), best=top, level=level and not top))
    return scores


def repeated(runs: Sequence[GridRun], name: str) -> Measure | None:
    """The mean of a metric over repeated runs with their smallest and largest value; a single run's own interval."""
    known = [value for run in runs if (value := measure(run.metrics, name))]
    if len(known) < 2:
        return known[0] if known else None
    values = [value.value for value in known]
    bases = [value.base for value in known if value.base is not None]
    return Measure(float(np.mean(values)), min(values), max(values), float(np.mean(bases)) if bases else None)


def agreement(grid: Grid) -> np.ndarray:
    """Mean Jaccard index (methods, methods) of kept sets over the conditions both were run under; NaN where none."""
    by_condition: dict[object, dict[str, list[PrunePlan]]] = {}
    for run in grid.done:
        if run.record and run.record.plan:
            plans = by_condition.setdefault(grid.condition(run), {}).setdefault(grid.names[run.name], [])
            plans.append(run.record.plan)
    methods = list(grid.methods)
    table = np.full((len(methods), len(methods)), np.nan)
    for i, one in enumerate(methods):
        for j, other in enumerate(methods):
            scores = [
                jaccard(a, b)
                for plans in by_condition.values()
                for x, a in enumerate(plans.get(one, []))
                for y, b in enumerate(plans.get(other, []))
                if i != j or x < y
            ]
            table[i, j] = np.mean(scores) if scores else (1.0 if i == j else np.nan)
    return table


@dataclass(frozen=True)
class Prediction:
    """One run's objective values and the damage that was measured."""

    method: str
    ratio: float
    costs: Mapping[
        str, float | None
    ]  # objective -> the set's cost as a share of pruning every expert, mean over layers
    damage: float  # KL, mean over the domains that calibration saw, or over all


def predictions(grid: Grid) -> list[Prediction]:
    """Cost against KL, for every run whose statistics are present."""
    pairs = []
    for run in grid.done:
        damage = damage_of(run)
        if run.record is None or run.record.plan is None or damage is None or run.ratio is None:
            continue
        costs = (cost_share(run, COMMON), cost_share(run, run.record.plan.criterion))
        pairs.append(Prediction(grid.names[run.name], run.ratio, dict(zip(OBJECTIVES, costs)), damage))
    return pairs


def correlations(runs: Sequence[Prediction]) -> list[str]:
    """For each objective, how well its cost ranks the damage: over all runs, and among those of one ratio."""
    sentences = []
    for words in OBJECTIVES:
        known = [(cost, run) for run in runs if (cost := run.costs[words]) is not None]
        rho = _correlation(known)
        if rho is None:
            continue
        # Across ratios almost anything correlates.
        groups = [
            [pair for pair in known if round(pair[1].ratio, 6) == r] for r in {round(p.ratio, 6) for _, p in known}
        ]
        within = [value for group in groups if (value := _correlation(group)) is not None]
        inside = f" (among runs of one ratio {sum(within) / len(within):.2f} on average)" if within else ""
        sentences.append(f"{words}: Spearman ρ = {rho:.2f} over {len(known)} runs{inside}")
    return sentences


def _correlation(pairs: Sequence[tuple[float, Prediction]]) -> float | None:
    return spearman([cost for cost, _ in pairs], [run.damage for _, run in pairs])


def damage_of(run: GridRun) -> float | None:
    """Mean KL over the evaluated domains that calibration saw; over all when it saw none."""
    domains = [d for d in _kl_domains(run) if run.record and d in run.record.calibrated] or _kl_domains(run)
    return float(np.mean([run.metrics[f"fidelity/kl/{d}"] for d in domains])) if domains else None


def _kl_domains(run: GridRun) -> list[str]:
    return [domain for domain in evaluated_domains(run.metrics) if f"fidelity/kl/{domain}" in run.metrics]


def cost_share(run: GridRun, criterion: Mapping[str, Any]) -> float | None:
    """Mean over layers of the plan's cost under a criterion, divided by the cost of pruning every expert."""
    record = run.record
    if record is None or record.plan is None or not record.mixed or criterion.get("name") == "file":
        return None
    assert record.statistics is not None
    weights = {name: weight for name, weight in record.plan.mix.items() if name in record.statistics.domains}
    shares = []
    try:
        rule = SelectionOptions.model_validate({"criterion": dict(criterion)}).criterion
        for evidence in gather(record.statistics, weights):
            objective: Objective = rule.objective(evidence)  # type: ignore[union-attr]
            pruned = np.ones(evidence.layer.num_experts, dtype=bool)
            whole = objective.cost(pruned)
            pruned[list(record.plan.kept[evidence.layer.name])] = False
            if whole > 0:
                shares.append(objective.cost(pruned) / whole)
    except (ValidationError, InputError):  # a criterion of somebody's own that cannot be imported here
        return None
    return float(np.mean(shares)) if shares else None


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Rank correlation; None for fewer than three points or a constant."""
    if len(x) < 3 or len(set(x)) < 2 or len(set(y)) < 2:
        return None
    from scipy.stats import spearmanr

    return float(spearmanr(x, y).statistic)
