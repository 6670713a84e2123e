"""Portfolios: every accepted change is measured and beyond chance, and every layer has the set of one of the plans."""

import numpy as np
import pytest

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import read_json
from moeprune.artifacts.plan import PrunePlan
from moeprune.config.load import load_run
from moeprune.data.trajectories import TokenSet
from moeprune.evaluation.fidelity import compare_students
from moeprune.evaluation.intervals import Comparison, DomainSums
from moeprune.evaluation.students import pruned_students
from moeprune.recording.recorder import record
from moeprune.run import opened
from moeprune.run.pipeline import run_file
from moeprune.run.refine import goal_of, improvement, refine
from moeprune.run.run_data import Inputs
from moeprune.selection.options import SelectionOptions
from moeprune.selection.select import select
from tests.tiny import build
from tests.tokens import random_pieces, token_set

pytestmark = pytest.mark.usefixtures("plain_figures")

ONE, OTHER = (
    token_set(random_pieces(lengths, seed=seed), domain=name)
    for name, lengths, seed in (("a", [17, 30, 9, 25], 3), ("b", [21, 8, 26], 4))
)
TOKENS = TokenSet(ONE.sequences + OTHER.sequences, {**ONE.manifest, **OTHER.manifest})
RULES = {"reap": {"name": "reap"}, "hope": {"name": "hope"}, "random": {"name": "random"}, "ean": {"name": "ean"}}


@pytest.fixture(scope="module")
def model():
    return build("qwen3_moe")


@pytest.fixture(scope="module")
def plans(model):
    statistics = record(model, TOKENS)
    return {
        label: select(statistics, SelectionOptions.parse({"criterion": rule, "budget": {"prune": 0.5}}))
        for label, rule in RULES.items()
    }


def compared(model, plans):
    return compare_students(model, pruned_students(model, plans), TOKENS)


@pytest.mark.parametrize("goal", ["mean", "worst"])
def test_without_a_margin_the_result_is_a_local_optimum_of_single_exchanges(model, plans, goal):
    portfolio = refine(model, plans, TOKENS, goal=goal, margin=0.0, rounds=20)
    best = goal_of(compared(model, {"": portfolio.plan})[""], goal)
    alone = compared(model, plans)
    assert best <= min(goal_of(comparison, goal) for comparison in alone.values())
    for number, layer in enumerate(portfolio.plan.layers):
        assert layer.kept == plans[portfolio.chosen[layer.name]].layers[number].kept
        for plan in plans.values():
            layers = [*portfolio.plan.layers]
            layers[number] = plan.layers[number]
            other = portfolio.plan.model_copy(update={"layers": tuple(layers)})
            assert best <= goal_of(compared(model, {"": other})[""], goal) + 1e-12
    falling = (
        [portfolio.changes[0].before, *(change.after for change in portfolio.changes)] if portfolio.changes else [best]
    )
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] == pytest.approx(best)


def test_a_margin_keeps_what_chance_could_explain(model, plans):
    portfolio = refine(model, plans, TOKENS, margin=1e6)
    assert portfolio.changes == ()
    assert portfolio.plan == plans[portfolio.start]
    for change in refine(model, plans, TOKENS, margin=0.5, rounds=5).changes:
        assert change.before - change.after > 0.5 * change.error


def test_the_standard_error_is_that_of_many_draws():
    draw = np.random.default_rng(0)

    def drawn(shift):
        tokens = draw.integers(20, 60, 40)
        sums = np.stack([tokens * (0.5 + 0.1 * draw.standard_normal(40)) for _ in range(4)])
        return tokens, sums, sums[2] - shift * tokens + draw.standard_normal(40)

    gains, errors = [], []
    for _ in range(400):
        tokens, sums, better = drawn(0.02)
        ids = tuple(f"{i:02d}" for i in range(40))
        old = Comparison({"a": DomainSums(ids, tokens, *sums)})
        new = Comparison({"a": DomainSums(ids, tokens, sums[0], sums[1], better, sums[3])})
        gain, error = improvement(old, new, "mean")
        gains.append(gain)
        errors.append(error)
    assert np.mean(gains) == pytest.approx(0.02, abs=0.001)
    assert np.mean(errors) == pytest.approx(np.std(gains), rel=0.1)


def test_plans_with_other_counts_are_refused(model, plans):
    statistics = record(model, TOKENS)
    quarter = select(statistics, SelectionOptions.parse({"budget": {"prune": 0.25}}))
    with pytest.raises(InputError, match="scope: layer"):
        refine(model, {**plans, "quarter": quarter}, TOKENS)


CONFIG = """
model: {path: reference}
calibration: {domains: [{name: agent, path: reference:agent, tokens: 2048}]}
selection: {criterion: {name: frequency}, budget: {prune: 0.25}}
refine: {criteria: [{name: reap}, {name: hope}, {name: hope, normalise: co_selected}], tokens: 2048, margin: 0.5}
checkpoint: {save: false}
evaluation: {domains: [{name: agent, path: reference:agent, tokens: 1024}]}
tracking: {wandb: disabled}
"""


def test_a_run_with_a_portfolio_keeps_it_in_the_plan_and_reuses_it(tmp_path):
    config = tmp_path / "portfolio.yaml"
    config.write_text(CONFIG)
    outcome = run_file(config, ["refine.tokens=1024"], output=tmp_path / "runs")
    plan = PrunePlan.load(outcome.directory / "plan.json")
    assert list(plan.criterion["criteria"]) == ["frequency", "reap", "hope", "hope-2"]
    assert plan.criterion["start"] != "frequency"
    assert set(plan.criterion["chosen"]) == {layer.name for layer in plan.layers}
    entry = read_json(outcome.directory / "run.json")["stages"]["select"]
    assert all(change["after"] < change["before"] for change in entry["refined"])
    assert "portfolio of frequency, reap, hope, hope-2" in (outcome.directory / "report.md").read_text()
    again = run_file(config, ["refine.tokens=1024"], output=tmp_path / "runs", redo="select", until="select")
    assert PrunePlan.load(again.directory / "plan.json") == plan
    assert read_json(again.directory / "run.json")["stages"]["select"]["key"] == entry["key"]


def test_what_cannot_be_refined_is_refused_before_recording(tmp_path, monkeypatch):
    config = tmp_path / "portfolio.yaml"
    config.write_text(CONFIG)
    for overrides, free, message in ((["selection.budget.scope=global"], 2**40, "scope: layer"), ([], 0, "do not fit")):
        monkeypatch.setattr(opened, "free_bytes", lambda device, free=free: free)
        with pytest.raises(InputError, match=message):
            run_file(config, overrides, output=tmp_path / message.replace(" ", ""))
        assert not list(tmp_path.rglob("statistics.safetensors*"))


def test_validation_trajectories_were_not_recorded(tmp_path):
    config = tmp_path / "portfolio.yaml"
    config.write_text(CONFIG)
    data = Inputs(load_run(config)).data
    validation = data.validation(2048, {})
    fresh, recorded = ({s.trajectory for s in tokens.sequences} for tokens in (validation, data.calibration))
    assert not fresh & recorded
    assert 2048 - 512 <= validation.tokens <= 2048
    assert not validation.warnings
    everything = load_run(config, ["calibration.domains=[{name: agent, path: 'reference:agent'}]"])
    validation = Inputs(everything).data.validation(2048, {})
    assert 2048 - 512 <= validation.tokens <= 2048
    (warning,) = validation.warnings
    assert "every calibration trajectory of agent was recorded" in warning
