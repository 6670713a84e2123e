"""What a student lost against its teacher, per trajectory, and intervals from resampled trajectories.

Tokens of one trajectory are not independent, trajectories are. So every figure is a token-weighted ratio (sum of values
over sum of tokens) and its 95 % interval comes from drawing whole trajectories with replacement (percentile bootstrap).
The draws depend on the seed and the domain alone: two students are compared on the same draws (paired), and a domain
more or less leaves the others' intervals alone.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95
FEW_TRAJECTORIES = 10  # fewer make a bootstrap interval visibly too narrow: warn
_BLOCK = 2**23  # draws held at a time, in numbers


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % interval; the ends are None for a single trajectory."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class DomainSums:
    """Sums over the counted next-token positions of each trajectory; all arrays (trajectories,)."""

    trajectories: tuple[str, ...]  # ids, ascending: the order of the data does not matter
    tokens: np.ndarray  # int64, at least 1 each
    nll_base: np.ndarray  # float64, nats
    nll: np.ndarray  # float64, nats
    kl: np.ndarray  # float64, nats, KL(teacher || student)
    top1: np.ndarray  # float64, positions where both put the same token first

    def values(self) -> np.ndarray:
        """(4, trajectories): NLL of the teacher, NLL, KL, agreement."""
        return np.stack([self.nll_base, self.nll, self.kl, self.top1])


@dataclass(frozen=True)
class Comparison:
    """One student against the teacher: domain -> sums per trajectory."""

    domains: Mapping[str, DomainSums]

    def metrics(self, *, seed: int = 0) -> dict[str, float]:
        """The fidelity metrics, flat: `fidelity/<measure>/<domain>` with `/base`, `/ci_low`, `/ci_high`."""
        flat: dict[str, float] = {}
        for name, point, draws in self._figures(seed):
            flat[name] = float(point)
            if draws is not None and not name.endswith("/base"):
                low, high = _ends(draws)
                flat[f"{name}/ci_low"], flat[f"{name}/ci_high"] = low, high
        return flat

    @property
    def warnings(self) -> list[str]:
        """What a reader of the intervals has to know."""
        out = []
        for name, sums in self.domains.items():
            count = len(sums.trajectories)
            if count == 1:
                out.append(f"evaluation domain {name}: one trajectory, so no interval can be given; evaluate more data")
            elif count < FEW_TRAJECTORIES:
                out.append(
                    f"evaluation domain {name}: the interval rests on {count} trajectories and is likely too narrow; "
                    f"{FEW_TRAJECTORIES} or more are wanted"
                )
        return out

    def _figures(self, seed: int) -> Iterator[tuple[str, float, np.ndarray | None]]:
        """(metric name, value, its value in every resample or None) of every figure."""
        kl_points, kl_draws = [], []
        for domain, sums in self.domains.items():
            points, draws = _ratios(domain, sums, seed)
            figures: list[tuple[str, int, Callable[[np.ndarray], np.ndarray] | None]] = [
                ("nll/{}/base", 0, None),
                ("nll/{}", 1, None),
                ("perplexity/{}/base", 0, np.exp),
                ("perplexity/{}", 1, np.exp),
                ("kl/{}", 2, None),
                ("top1/{}", 3, None),
            ]
            for name, row, transform in figures:
                point, drawn = points[row], None if draws is None else draws[row]
                if transform is not None:
                    point, drawn = transform(point), None if drawn is None else transform(drawn)
                yield "fidelity/" + name.format(domain), float(point), drawn
            kl_points.append(points[2])
            kl_draws.append(None if draws is None else draws[2])
        known = [draws for draws in kl_draws if draws is not None]
        complete = np.stack(known) if len(known) == len(kl_draws) else None
        yield "fidelity/kl/mean", float(np.mean(kl_points)), None if complete is None else complete.mean(axis=0)
        yield "fidelity/kl/worst", float(np.max(kl_points)), None if complete is None else complete.max(axis=0)


def paired_difference(a: Comparison, b: Comparison, *, seed: int = 0) -> dict[str, Estimate]:
    """Figures of `a` minus figures of `b`, metric name -> estimate; both on the same resampled trajectories.

    Raises ValueError when the two were not measured on the same trajectories.
    """
    for name in sorted(a.domains.keys() | b.domains.keys()):
        one, other = a.domains.get(name), b.domains.get(name)
        if one is None or other is None or one.trajectories != other.trajectories or (one.tokens != other.tokens).any():
            raise ValueError(f"domain {name}: the two were measured on different trajectories; no paired difference")
    other_figures = {name: (point, draws) for name, point, draws in b._figures(seed)}
    out = {}
    for name, point, draws in a._figures(seed):
        if name.endswith("/base"):
            continue
        other_point, other_draws = other_figures[name]
        low, high = (None, None) if draws is None or other_draws is None else _ends(draws - other_draws)
        out[name] = Estimate(point - other_point, low, high)
    return out


def share_metrics(name: str, hits: Sequence[bool], groups: Sequence[str]) -> dict[str, float]:
    """The share of hits as `<name>` and, by group, as `<name>.<group>`, with 95 % Wilson intervals."""
    parts = {name: list(hits)}
    for group in sorted(set(groups)):
        parts[f"{name}.{group}"] = [hit for hit, own in zip(hits, groups, strict=True) if own == group]
    metrics: dict[str, float] = {}
    for part, values in parts.items():
        low, high = wilson(sum(values), len(values))
        metrics |= {part: sum(values) / len(values), f"{part}/ci_low": low, f"{part}/ci_high": high}
    return metrics


def base_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """The same figures as those of the unpruned model: `<name>/base`, without intervals."""
    return {f"{name}/base": value for name, value in metrics.items() if not name.endswith(("/ci_low", "/ci_high"))}


def wilson(successes: int, trials: int, *, z: float = 1.959963984540054) -> tuple[float, float]:
    """Score interval of a share; unlike a bootstrap it does not shrink to a point at 0 or 1."""
    share = successes / trials
    centre = share + z * z / (2 * trials)
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    # At the ends the exact limits are 0 and 1; rounding would miss them.
    low = 0.0 if successes == 0 else (centre - half) / scale
    return low, 1.0 if successes == trials else (centre + half) / scale


def _ends(draws: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _ratios(domain: str, sums: DomainSums, seed: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Token-weighted means (4,), and the same of every resample (4, resamples) or None for a single trajectory."""
    values = sums.values()
    points = values.sum(axis=1) / sums.tokens.sum()
    count = len(sums.trajectories)
    if count == 1:
        return points, None
    columns = np.vstack([values, sums.tokens]).T  # (trajectories, 5)
    totals = np.concatenate([draws @ columns for draws in _draws(domain, count, seed)])  # (resamples, 5)
    return points, (totals[:, :4] / totals[:, 4:]).T


def _draws(domain: str, count: int, seed: int) -> Iterator[np.ndarray]:
    """How often each trajectory is drawn, in blocks of (some resamples, trajectories)."""
    entropy = int.from_bytes(hashlib.sha256(domain.encode()).digest()[:8], "big")
    generator = np.random.default_rng([seed, entropy])
    left = RESAMPLES
    while left:
        size = min(left, max(1, _BLOCK // count))
        yield generator.multinomial(count, np.full(count, 1 / count), size=size)
        left -= size
