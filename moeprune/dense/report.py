"""What happened to every weight, and to which weights nothing happened."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from moeprune.dense.weights import Seen

TOP = 10  # warnings of one kind that are spelled out


@dataclass(frozen=True)
class Step:
    """One method on one weight; the counts are taken from the weight as it is stored."""

    weight: str
    role: str
    method: str
    shape: tuple[int, int]  # (out, in)
    tokens: int  # calibration tokens that reached it
    sparsity: float  # share of exact zeros after this step
    pattern: str | None = None  # the N:M pattern that holds, where one was asked for
    bits: float | None = None  # stored bits a weight, scales included; None: not quantised
    error: float | None = None  # ||W X - W' X||^2 / ||W X||^2 against the weight before all steps; None: no Hessian
    fallback: str | None = None
    damping_steps: int = 0
    dead_columns: int = 0

    @property
    def parameters(self) -> int:
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True)
class Coverage:
    """One row of the coverage table: what a role holds and what became of it."""

    role: str
    methods: str  # "sparsegpt + gptq", or why it stayed
    weights: int
    parameters: int
    example: str


@dataclass(frozen=True)
class DenseReport:
    steps: tuple[Step, ...] = ()
    coverage: tuple[Coverage, ...] = ()
    warnings: tuple[str, ...] = field(default=())

    def metrics(self) -> dict[str, float]:
        """Flat numbers named dense/<role>/<measure>, of the last step of every weight."""
        last = {step.weight: step for step in self.steps}
        roles: dict[str, list[Step]] = {}
        for step in last.values():
            roles.setdefault(step.role, []).append(step)
        return {
            f"dense/{role}/{name}": value for role, rows in roles.items() for name, value in _measures(rows).items()
        }

    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)


def _measures(steps: list[Step]) -> dict[str, float]:
    parameters = sum(step.parameters for step in steps)
    errors = [step.error for step in steps if step.error is not None]
    values = {
        "weights": float(len(steps)),
        "parameters": float(parameters),
        "sparsity": sum(step.sparsity * step.parameters for step in steps) / parameters,
        "fallbacks": float(sum(step.fallback is not None for step in steps)),
        "damping_steps": float(sum(step.damping_steps for step in steps)),
        "dead_columns": float(sum(step.dead_columns for step in steps)),
    }
    if all(step.bits is not None for step in steps):
        values["bits"] = sum((step.bits or 0.0) * step.parameters for step in steps) / parameters
    if errors:
        values["error_mean"] = sum(errors) / len(errors)
        values["error_worst"] = max(errors)
    return values


def coverage(seen: Seen, steps: Iterable[Step]) -> tuple[Coverage, ...]:
    """Every linear map of the model in one row or another, largest first; nothing is left out silently."""
    methods: dict[str, list[str]] = {}
    for step in steps:
        shown = step.method if step.fallback is None else f"{step.method} (fallback: {step.fallback})"
        methods.setdefault(step.weight, []).append(shown)
    rows: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for weight in seen.weights:
        source = seen.tied.get(weight, weight).name
        done = " + ".join(methods.get(source, ())) or "unchanged: no target names it"
        rows.setdefault((weight.role, done), []).append((weight.name, weight.shape[0] * weight.shape[1]))
    for left in seen.left:
        rows.setdefault(("-", f"unchanged: {left.reason}"), []).append((left.name, left.parameters))
    table = [
        Coverage(role, done, len(items), sum(count for _, count in items), items[0][0])
        for (role, done), items in rows.items()
    ]
    return tuple(sorted(table, key=lambda row: (-row.parameters, row.role, row.methods)))


def summarised(warnings: list[str]) -> tuple[str, ...]:
    """Warnings with long runs of one kind cut to a count; the kind is what stands after the first colon."""
    kinds: dict[str, list[str]] = {}
    for warning in warnings:
        kinds.setdefault(_kind(warning), []).append(warning)
    shown: list[str] = []
    for same in kinds.values():
        shown += same[:TOP]
        if len(same) > TOP:
            shown.append(f"... and {len(same) - TOP} more like the last one")
    return tuple(shown)


def _kind(warning: str) -> str:
    return "".join(letter for letter in warning.partition(": ")[2] if not letter.isdigit())
