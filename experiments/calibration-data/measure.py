"""What calibration data does to a pruned model, measured on the reference model.

    python measure.py mix count tokens -o .          # about fifteen minutes on one core; --small for a smoke run

Writes mix.csv, count.csv and tokens.csv; plot.py makes the figures from them.
"""

import argparse
import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from moeprune.artifacts.plan import PrunePlan
from moeprune.artifacts.statistics import RoutingStatistics
from moeprune.data.options import Count, Domain, Intake
from moeprune.data.trajectories import TokenSet, load_records, load_tokens
from moeprune.evaluation.agent import agent_questions, agent_task
from moeprune.evaluation.fidelity import fidelity
from moeprune.models.loading import (
    load_model,
)
from moeprune.models.options import ModelOptions
from moeprune.recording.recorder import record
from moeprune.reference import DOMAINS
from moeprune.selection.options import SelectionOptions
from moeprune.selection.select import select

HOPE = {"name": "hope", "normalise": "all_tokens"}
CRITERIA: dict[str, dict[str, Any]] = {
    "hope all_tokens": HOPE,
    "hope co_selected": {"name": "hope", "normalise": "co_selected"},
    "reap": {"name": "reap"},
    "frequency": {"name": "frequency"},
}
EVERY = dict.fromkeys(DOMAINS, 1.0)
MIXES: dict[str, Mapping[str, float]] = {
    "agent": {"agent": 1},
    "agent 10, others 1": EVERY | {"agent": 10.0},
    "agent 3, others 1": EVERY | {"agent": 3.0},
    "all equal": EVERY,
    "all but agent": EVERY | {"agent": 0.0},
    "prose": {"prose": 1},
}
COUNTS: tuple[Count, ...] = ("all", "assistant", "completion", "tool")
LIMITS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
Row = dict[str, Any]


class Laboratory:
    """The reference model with its held-out data."""

    def __init__(
        self, *, tokens: int, heldout: int, questions: int, seeds: int, limits: tuple[int, ...], most: int | None
    ) -> None:
        self.tokens, self.seeds, self.limits, self.most = tokens, seeds, limits, most
        loaded = load_model(ModelOptions(dtype="float32"), device="cpu")
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        domains = [Domain(name=name, path=f"reference:{name}", tokens=heldout) for name in DOMAINS]
        domains.append(Domain(name="agent.assistant", path="reference:agent", tokens=heldout, count="assistant"))
        self.heldout = load_tokens(domains, self.tokenizer, Intake(), part="heldout")
        records = load_records(Domain(name="agent", path="reference:agent"), part="heldout")
        self.questions, _ = agent_questions(records, count=questions)

    def recorded(self, domains: list[Domain], *, seed: int = 0) -> RoutingStatistics:
        return record(self.model, load_tokens(domains, self.tokenizer, Intake(seed=seed), part="calibration"))

    def measured(self, plans: Mapping[str, PrunePlan]) -> dict[str, dict[str, float]]:
        """Label -> KL by domain, and the accuracy of the agent task."""
        metrics = fidelity(self.model, plans, self.heldout)
        answers = agent_task(self.model, self.tokenizer, self.questions, plans)
        table: dict[str, dict[str, float]] = {}
        for label in plans:
            names = (*DOMAINS, "agent.assistant")
            table[label] = {f"kl {name}": metrics[label][f"fidelity/kl/{name}"] for name in names}
            others = [table[label][f"kl {name}"] for name in DOMAINS if name != "agent"]
            table[label]["kl mean of the others"] = sum(others) / len(others)
            table[label]["agent accuracy"] = answers[label]["task/accuracy/agent"]
        return table

    def agent_kl(self, plans: Mapping[str, PrunePlan]) -> dict[str, float]:
        """Label -> KL on held-out agent trajectories."""
        sequences = tuple(sequence for sequence in self.heldout.sequences if sequence.domain == "agent")
        metrics = fidelity(self.model, plans, TokenSet(sequences, {}))
        return {label: metrics[label]["fidelity/kl/agent"] for label in plans}


def plan_for(
    statistics: RoutingStatistics,
    prune: float,
    *,
    criterion: Mapping[str, Any] = HOPE,
    mix: Mapping[str, float] | None = None,
) -> PrunePlan:
    weights = {name: float((mix or {}).get(name, 0.0)) for name in statistics.domains} if mix else {}
    section = {"criterion": dict(criterion), "budget": {"prune": prune}, "mix": weights}
    return select(statistics, SelectionOptions.parse(section))


def mixes(lab: Laboratory) -> Iterator[Row]:
    """One recording of six domains, six mixes of it."""
    domains = [Domain(name=name, path=f"reference:{name}", tokens=lab.tokens) for name in DOMAINS]
    statistics = lab.recorded(domains)
    for prune in (0.125, 0.25, 0.5):
        plans = {label: plan_for(statistics, prune, mix=mix) for label, mix in MIXES.items()}
        for label, values in lab.measured(plans).items():
            yield {"mix": label, "prune": prune, **values}


def counts(lab: Laboratory) -> Iterator[Row]:
    """The same agent trajectories, other tokens of them."""
    plans: dict[str, PrunePlan] = {}
    told: dict[str, Row] = {}
    for seed in range(lab.seeds):
        for count in COUNTS:
            domain = Domain(name="agent", path="reference:agent", tokens=lab.tokens, count=count)
            statistics = lab.recorded([domain], seed=seed)
            for prune in (0.25, 0.5):
                label = f"{count} {prune} {seed}"
                plans[label] = plan_for(statistics, prune)
                counted = statistics.manifest["domains"]["agent"]["counted"]
                told[label] = {"count": count, "prune": prune, "seed": seed, "counted": counted}
                told[label]["jaccard of halves"] = jaccard_of_halves(plans[label])
    for label, values in lab.measured(plans).items():
        yield told[label] | values


def amounts(lab: Laboratory) -> Iterator[Row]:
    """More and more tokens of the agent trajectories: how much the plan still changes, and what it costs."""
    every = lab.recorded([Domain(name="agent", path="reference:agent", tokens=lab.most)])
    for limit in lab.limits:
        for seed in range(lab.seeds):
            domain = Domain(name="agent", path="reference:agent", tokens=limit)
            statistics = lab.recorded([domain], seed=seed)
            plans = {name: plan_for(statistics, 0.5, criterion=criterion) for name, criterion in CRITERIA.items()}
            losses = lab.agent_kl(plans)
            for name, plan in plans.items():
                whole = plan_for(every, 0.5, criterion=CRITERIA[name])
                row = {"tokens": limit, "seed": seed, "criterion": name}
                row["jaccard of halves"] = jaccard_of_halves(plan)
                row["jaccard with all data"] = jaccard(plan, whole)
                yield row | {"kl agent": losses[name]}


def jaccard_of_halves(plan: PrunePlan) -> float:
    """Mean over layers: experts that both halves of the trajectories prune / that either prunes; nan without halves."""
    values = [(layer.stability or {}).get("jaccard", float("nan")) for layer in plan.layers]
    return sum(values) / len(values)


def jaccard(one: PrunePlan, other: PrunePlan) -> float:
    """Mean over layers: experts pruned by both plans / by either."""
    shares = []
    for mine, theirs in zip(one.layers, other.layers, strict=True):
        pruned = [set(range(layer.num_experts)) - set(layer.kept) for layer in (mine, theirs)]
        shares.append(len(pruned[0] & pruned[1]) / len(pruned[0] | pruned[1]))
    return sum(shares) / len(shares)


PARTS = {"mix": mixes, "count": counts, "tokens": amounts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("-o", "--output", type=Path, default=Path())
    parser.add_argument("--small", action="store_true", help="a smoke run: few tokens, numbers without meaning")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    size: dict[str, Any] = {
        "tokens": 32768,
        "heldout": 8192,
        "questions": 40,
        "seeds": 3,
        "limits": LIMITS,
        "most": None,
    }
    if arguments.small:
        size = {"tokens": 1024, "heldout": 256, "questions": 2, "seeds": 1, "limits": (512, 1024), "most": 2048}
    lab = Laboratory(**size)
    for part in arguments.parts:
        rows = list(PARTS[part](lab))
        path = arguments.output / f"{part}.csv"
        with path.open("w", newline="", encoding="utf-8") as out:
            writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)
        print(path)


if __name__ == "__main__":
    main()
