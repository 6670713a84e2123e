"""The fine-grained model beside the reference: perplexity on held-out text, the agent task, and what HOPE calls cheap.

    python experiments/fine-grained/compare.py MODEL

Differences are paired: both models read the same tokens and answer the same questions.
"""

import sys
from collections.abc import Sequence

import numpy as np

import moeprune as mp
from moeprune.evaluation.agent import agent_answers
from moeprune.evaluation.fidelity import compare, logits_of
from moeprune.evaluation.intervals import Comparison, Estimate, paired_difference
from moeprune.models.loading import LoadedModel
from moeprune.reference import DOMAINS
from moeprune.selection.redundancy import redundancy

HELD_OUT, CALIBRATION, QUESTIONS = 40_960, 4096, 200
TRAJECTORY = 4096  # tokens of one file at most: an interval over files needs several
SHARES = (0.125, 0.25, 0.5, 0.75)  # of the experts of a layer


def tokens_of(model: LoadedModel, count: int, part: str) -> mp.TokenSet:
    limits = {"tokens": count, "trajectory_tokens": TRAJECTORY}
    domains = [mp.Domain(name=name, path=f"reference:{name}", **limits) for name in DOMAINS]
    return mp.load_tokens(domains, model.tokenizer, mp.Intake(), part=part)


def perplexity_table(reference: Comparison, fine: Comparison) -> str:
    """Perplexity by domain: the reference, the fine-grained model, and the difference with its 95 % interval."""
    difference = paired_difference(fine, reference)
    lines = ["| domain | reference | fine-grained | fine-grained minus reference |", "|---|---|---|---|"]
    for domain in DOMAINS:
        name = f"fidelity/perplexity/{domain}"
        one, other = reference.metrics()[name], fine.metrics()[name]
        lines.append(f"| {domain} | {one:.2f} | {other:.2f} | {bold(difference[name])} |")
    return "\n".join(lines)


def bold(estimate: Estimate) -> str:
    assert estimate.low is not None
    assert estimate.high is not None
    text = f"{estimate.value:+.2f} [{estimate.low:+.2f}, {estimate.high:+.2f}]"
    return f"**{text}**" if estimate.low * estimate.high > 0 else text


def cheap_shares(model: LoadedModel) -> list[np.ndarray]:
    """By layer: HOPE's cost of pruning each of SHARES, as a share of the cost of pruning every expert but top_k."""
    statistics = mp.record(model.model, tokens_of(model, CALIBRATION, "calibration"))
    found = redundancy(statistics, mp.SelectionOptions.parse({"criterion": {"name": "hope"}}))
    curves = []
    for layer in found["layers"]:
        count, cost = np.array(layer["pruned"]), np.array(layer["cost"])
        curves.append(np.interp(np.array(SHARES) * layer["num_experts"], count, cost / cost[-1]))
    return curves


def main(arguments: Sequence[str]) -> None:
    (path,) = arguments
    reference, fine = (mp.load_model(mp.ModelOptions(path=p, dtype="float32")) for p in ("reference", path))
    models = {"reference": reference, "fine-grained": fine}
    logits = {name: logits_of(model.model) for name, model in models.items()}
    found = compare(logits["reference"], logits, tokens_of(reference, HELD_OUT, "heldout"))
    print(perplexity_table(found["reference"], found["fine-grained"]))
    records = mp.load_records(mp.Domain(name="agent", path="reference:agent"), part="heldout")
    questions, _ = mp.agent_questions(records, count=QUESTIONS)
    for name, model in models.items():
        correct = agent_answers(model.model, model.tokenizer, questions).correct
        parameters = sum(parameter.numel() for parameter in model.model.parameters())
        print(f"\n{name}: {parameters:,} parameters, {sum(correct)} of {len(correct)} questions")
        for layer, shares in enumerate(cheap_shares(model)):
            cells = [f"{100 * share:g} %: {cost:.3f}" for share, cost in zip(SHARES, shares, strict=True)]
            print(f"layer {layer}: {', '.join(cells)}")


if __name__ == "__main__":
    main(sys.argv[1:])
