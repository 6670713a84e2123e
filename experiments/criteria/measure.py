"""What a dozen selection rules do to the reference model, over calibration draws that nobody had looked at before.

    python experiments/criteria/measure.py          # about twenty minutes on one core; goes on where it was stopped

Every draw is another sample of calibration tokens. All rules of a draw choose from the same recording and are measured
on the same held-out tokens and questions. Writes results.csv; compare.py makes the tables and the figure from it.
"""

import argparse
import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moeprune.artifacts.plan import PrunePlan
from moeprune.artifacts.statistics import RoutingStatistics
from moeprune.data.options import Domain, Intake
from moeprune.data.trajectories import TokenSet, load_records, load_tokens
from moeprune.evaluation.agent import agent_questions, agent_task
from moeprune.evaluation.fidelity import fidelity
from moeprune.models.loading import (
    load_model,
)
from moeprune.models.options import ModelOptions
from moeprune.recording.recorder import record
from moeprune.reference import DOMAINS
from moeprune.run.refine import refine
from moeprune.selection.options import Goal, SelectionOptions
from moeprune.selection.select import select

# Draws 10 to 14 and both ends of worst_domain's emphasis were written down here before any of them was measured.
DRAWS = range(10, 15)
TOKENS = 14_400  # of calibration a draw, in equal parts over its domains
CRITERIA: dict[str, dict[str, Any]] = {
    "random": {"name": "random"},
    "frequency": {"name": "frequency"},
    "ean": {"name": "ean"},
    "reap": {"name": "reap"},
    "reap_l2": {"name": "reap_l2"},
    "hope co_selected": {"name": "hope", "normalise": "co_selected"},
    "hope all_tokens": {"name": "hope", "normalise": "all_tokens"},
    "hope outputs": {"name": "hope", "product": "outputs", "normalise": "all_tokens"},
    "worst_domain 1": {"name": "worst_domain", "emphasis": 1.0},
    "worst_domain 0": {"name": "worst_domain", "emphasis": 0.0},
    "reroute": {"name": "reroute"},
}
# Chosen layer by layer among these rules' sets, by KL on tokens that come after the recorded ones; written down before.
PORTFOLIO = ("reap", "reap_l2", "hope co_selected", "hope all_tokens", "hope outputs", "worst_domain 0")
PORTFOLIOS: dict[str, Goal] = {"portfolio": "mean", "portfolio worst": "worst"}
VALIDATION = 24_576  # tokens, in equal parts over the domains
RULES = (*CRITERIA, *PORTFOLIOS)
FIELDS = ["setting", "draw", "criterion", *(f"kl {domain}" for domain in DOMAINS), "kl mean", "kl worst"]
FIELDS += ["agent accuracy"]


@dataclass(frozen=True)
class Setting:
    """What is calibrated on, and how much is pruned."""

    domains: tuple[str, ...]
    prune: float


SETTINGS = {
    "all 6.25 %": Setting(DOMAINS, 0.0625),
    "all 12.5 %": Setting(DOMAINS, 0.125),
    "agent 50 %": Setting(("agent",), 0.5),
}
Row = dict[str, Any]


class Laboratory:
    """The reference model with its held-out data."""

    def __init__(self, *, tokens: int, heldout: int, questions: int) -> None:
        self.tokens = tokens
        loaded = load_model(ModelOptions(dtype="float32"), device="cpu")
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        domains = [Domain(name=name, path=f"reference:{name}", tokens=heldout) for name in DOMAINS]
        self.heldout = load_tokens(domains, self.tokenizer, Intake(), part="heldout")
        records = load_records(Domain(name="agent", path="reference:agent"), part="heldout")
        self.questions, _ = agent_questions(records, count=questions)

    def calibration(self, names: tuple[str, ...], draw: int, *, tokens: int) -> TokenSet:
        domains = [Domain(name=name, path=f"reference:{name}", tokens=tokens // len(names)) for name in names]
        return load_tokens(domains, self.tokenizer, Intake(seed=draw), part="calibration")

    def recorded(self, names: tuple[str, ...], draw: int) -> RoutingStatistics:
        return record(self.model, self.calibration(names, draw, tokens=self.tokens), statistics="samples")

    def validation(self, names: tuple[str, ...], draw: int) -> TokenSet:
        """The trajectories that come after the recorded ones."""
        more = self.calibration(names, draw, tokens=self.tokens + self.tokens * VALIDATION // TOKENS)
        recorded = {s.trajectory for s in self.calibration(names, draw, tokens=self.tokens).sequences}
        return TokenSet(tuple(s for s in more.sequences if s.trajectory not in recorded), more.manifest)

    def portfolio(self, plans: Mapping[str, PrunePlan], tokens: TokenSet, goal: Goal) -> PrunePlan:
        made = refine(self.model, {label: plans[label] for label in PORTFOLIO}, tokens, goal=goal)
        changed = ", ".join(f"{change.layer} {change.source}" for change in made.changes)
        print(f"portfolio ({goal}) from {made.start}: {changed or 'unchanged'}", flush=True)
        return made.plan

    def measured(self, plans: Mapping[str, PrunePlan]) -> dict[str, Row]:
        """Label -> KL by domain and accuracy; plans that keep the same experts are measured once."""
        first: dict[Any, str] = {}
        twin = {label: first.setdefault(tuple(plan.kept.items()), label) for label, plan in plans.items()}
        distinct = {label: plans[label] for label in first.values()}
        metrics = fidelity(self.model, distinct, self.heldout)
        answers = agent_task(self.model, self.tokenizer, self.questions, distinct)
        table = {}
        for label in distinct:
            row = {f"kl {name}": metrics[label][f"fidelity/kl/{name}"] for name in (*DOMAINS, "mean", "worst")}
            table[label] = {**row, "agent accuracy": answers[label]["task/accuracy/agent"]}
        return {label: table[twin[label]] for label in plans}


def plan_for(statistics: RoutingStatistics, criterion: str, setting: Setting, draw: int) -> PrunePlan:
    options = dict(CRITERIA[criterion])
    section: dict[str, Any] = {"criterion": options, "budget": {"prune": setting.prune}}
    if criterion == "random":
        options["seed"] = draw
    if criterion == "reroute":
        section["solver"] = {"name": "swap", "starts": 1}  # backward elimination, then swaps
    return select(statistics, SelectionOptions.parse(section))


def read(path: Path) -> dict[tuple[str, int, str], Row]:
    if not path.is_file():
        return {}
    with path.open(encoding="utf-8", newline="") as lines:
        return {(row["setting"], int(row["draw"]), row["criterion"]): dict(row) for row in csv.DictReader(lines)}


def write(path: Path, rows: Mapping[tuple[str, int, str], Row]) -> None:
    order = [(s, d, c) for s in SETTINGS for d in sorted({key[1] for key in rows}) for c in RULES]
    beside = path.with_suffix(".partial")
    with beside.open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, fieldnames=FIELDS, lineterminator="\n")
        writer.writeheader()
        for key in order:
            if key in rows:
                writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in rows[key].items()})
    beside.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent)
    parser.add_argument("--only", nargs="+", choices=RULES, default=list(RULES), help="measure these rules alone")
    parser.add_argument("--small", action="store_true", help="a smoke run: few tokens, numbers without meaning")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    small = arguments.small
    lab = Laboratory(tokens=1_200 if small else TOKENS, heldout=128 if small else 6144, questions=2 if small else 40)
    path = arguments.output / "results.csv"
    for draw in list(DRAWS)[: 1 if small else None]:
        for name, setting in SETTINGS.items():
            rows = read(path)
            missing = [criterion for criterion in arguments.only if (name, draw, criterion) not in rows]
            if not missing:
                continue
            statistics = lab.recorded(setting.domains, draw)
            portfolios = [rule for rule in missing if rule in PORTFOLIOS]
            needed = {*missing, *(PORTFOLIO if portfolios else ())} & CRITERIA.keys()
            made = {rule: plan_for(statistics, rule, setting, draw) for rule in CRITERIA if rule in needed}
            if portfolios:
                tokens = lab.validation(setting.domains, draw)
                made |= {rule: lab.portfolio(made, tokens, PORTFOLIOS[rule]) for rule in portfolios}
            plans = {rule: made[rule] for rule in missing}
            for criterion, values in lab.measured(plans).items():
                key = {"setting": name, "draw": draw, "criterion": criterion}
                rows[name, draw, criterion] = {**key, **values}
            write(path, rows)
            print(f"{name}, draw {draw}: {', '.join(missing)}", flush=True)


if __name__ == "__main__":
    main()
