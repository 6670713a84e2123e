"""What an engine answered, beside what the pruned model in memory makes of the same tokens: the proof.

Both are judged along the ENGINE's tokens: the model in memory scores each of them after the same prefix, so that one
different token does not make all later ones incomparable.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from moeprune.serving.questions import Questions


@dataclass(frozen=True)
class Answer:
    """One completion: the engine's greedy tokens and its log-probability of each, in nats, None where it tells none."""

    tokens: tuple[int, ...]
    log_probabilities: tuple[float | None, ...]


@dataclass(frozen=True)
class Answers:
    """Everything an engine said."""

    engine: str
    version: str
    answers: tuple[Answer, ...]  # one a prompt
    tokenized: tuple[tuple[int, ...], ...]  # the engine's own tokens of the texts
    rendered: tuple[tuple[int, ...] | str, ...]  # and of the conversations, or why it refuses one

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> "Answers":
        return cls(
            engine=value["engine"],
            version=value["version"],
            answers=tuple(Answer(tuple(a["tokens"]), tuple(a["log_probabilities"])) for a in value["answers"]),
            tokenized=tuple(map(tuple, value["tokenized"])),
            rendered=tuple(r if isinstance(r, str) else tuple(r) for r in value["rendered"]),
        )


@dataclass(frozen=True)
class Score:
    """The model in memory on an engine's tokens of one prompt, each list as long as those."""

    log_probabilities: tuple[float, ...]  # of the engine's tokens
    best: tuple[float, ...]  # of the most likely tokens in their place


@dataclass(frozen=True)
class Tolerance:
    """What still counts as equal, in nats."""

    tie: float  # a token this close to the most likely one is as good
    most: float  # difference of a log-probability
    mean: float  # mean absolute difference of log-probabilities
    outliers: float  # share of tokens that may be further away than `tie` or `most`


# float32: kernels sum in another order, nothing else. 16 bits: rounding moves logits by a few hundredths of a nat, and
# now and then the choice of an expert, which shows in one token (experiments/serving has what was seen; a wrong expert
# in one layer is far outside). Quantised files are another model: they are measured, nothing is required of them.
TOLERANCES = {
    "float32": Tolerance(tie=1e-4, most=1e-3, mean=1e-4, outliers=0.0),
    "bfloat16": Tolerance(tie=0.25, most=0.5, mean=0.05, outliers=0.05),
    "float16": Tolerance(tie=0.05, most=0.1, mean=0.01, outliers=0.05),
}
# llama.cpp keeps attention masks and some products in half precision whatever the file holds.
LLAMA_CPP_FLOAT32 = Tolerance(tie=1e-2, most=0.1, mean=1e-2, outliers=0.05)


def tolerance_of(engine: str, dtype: str) -> Tolerance | None:
    """What is required of an engine that computes in this dtype; None for quantised weights."""
    return LLAMA_CPP_FLOAT32 if (engine, dtype) == ("llama.cpp", "float32") else TOLERANCES.get(dtype)


@dataclass(frozen=True)
class Step:
    """One of the engine's tokens, in nats."""

    behind: float  # how much less likely than the most likely one the model in memory finds it
    difference: float | None  # of the two log-probabilities

    def is_far(self, tolerance: Tolerance | None) -> bool:
        if tolerance is None:
            return False
        # Not `>`: nothing is larger than NaN, and an engine that computes NaN must not pass.
        return not (self.behind <= tolerance.tie and (self.difference or 0.0) <= tolerance.most)


@dataclass(frozen=True)
class Proof:
    """The comparison of one engine with the model in memory."""

    engine: str
    version: str
    dtype: str
    compared_with: str
    prompts: int
    tokens: int
    tokens_equal: int  # the most likely token of the model in memory, too
    ties: int  # others within `tolerance.tie` of it
    outliers: int  # tokens further away than the tolerance, in rank or in log-probability
    difference_mean: float  # of log-probabilities, nats
    difference_most: float
    tolerance: Tolerance | None  # None: nothing was required, as for a quantised file
    tokenizer: str  # "equal", or where it is not
    chats: dict[str, str]  # conversation -> "equal", "different" or the engine's refusal
    problems: tuple[str, ...]  # empty for a checkpoint that passed
    warnings: tuple[str, ...] = field(default=())

    @property
    def passed(self) -> bool:
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        return {"passed": self.passed, **asdict(self)}


def compare(
    questions: Questions,
    engine_answers: Answers,
    scores: Sequence[Score],
    *,
    dtype: str,
    tolerance: Tolerance | None,
    compared_with: str,
) -> Proof:
    """The proof, with every way in which the engine is not the model in memory as a problem that names the place."""
    steps = [
        [
            Step(best - ours, None if other is None else abs(other - ours))
            for other, ours, best in zip(answer.log_probabilities, score.log_probabilities, score.best, strict=True)
        ]
        for answer, score in zip(engine_answers.answers, scores, strict=True)
    ]
    differences = [step.difference for one in steps for step in one if step.difference is not None]
    behind = [step.behind for one in steps for step in one]
    limit = tolerance.tie if tolerance is not None else 0.0
    far = sum(step.is_far(tolerance) for one in steps for step in one)
    mean, most = (sum(differences) / len(differences), max(differences)) if differences else (0.0, 0.0)
    tokenizer = _tokenizer(questions, engine_answers)
    chats = _chats(questions, engine_answers)
    problems = []
    if tolerance is not None and far > tolerance.outliers * len(behind):
        problems += _far_tokens(questions, engine_answers, steps, tolerance)
    if tolerance is not None and not mean <= tolerance.mean:
        problems.append(f"log-probabilities differ by {mean:.2g} nats on average, more than {tolerance.mean:g}")
    if not differences:
        problems.append(f"{engine_answers.engine} generated no token for any prompt; nothing was compared")
    if tokenizer != "equal":
        problems.append(f"{engine_answers.engine} splits text into other tokens: {tokenizer}")
    problems += [
        f"{engine_answers.engine} renders {name} differently" for name, how in chats.items() if how == "different"
    ]
    warnings = [
        f"{engine_answers.engine} does not render {n}: {how}" for n, how in chats.items() if how.startswith("refused")
    ]
    silent = [name for name, answer in zip(questions.names, engine_answers.answers, strict=True) if not answer.tokens]
    if differences and silent:
        warnings.append(
            f"{engine_answers.engine} generated no token for {', '.join(silent)}; nothing was compared there"
        )
    return Proof(
        engine=engine_answers.engine,
        version=engine_answers.version,
        dtype=dtype,
        compared_with=compared_with,
        prompts=len(engine_answers.answers),
        tokens=len(behind),
        tokens_equal=sum(value <= 0 for value in behind),
        ties=sum(0 < value <= limit for value in behind),
        outliers=far,
        difference_mean=mean,
        difference_most=most,
        tolerance=tolerance,
        tokenizer=tokenizer,
        chats=chats,
        problems=tuple(problems),
        warnings=(*questions.warnings, *warnings),
    )


def _far_tokens(
    questions: Questions, engine_answers: Answers, steps: Sequence[Sequence[Step]], tolerance: Tolerance
) -> list[str]:
    """One line for every prompt with a token outside the tolerance."""
    lines = []
    for name, answer, values in zip(questions.names, engine_answers.answers, steps, strict=True):
        far = [i for i, step in enumerate(values) if step.is_far(tolerance)]
        if far:
            step = values[far[0]]
            lines.append(
                f"{name}: {len(far)} of {len(values)} tokens are too far from the model in memory; token {far[0] + 1} "
                f"({answer.tokens[far[0]]}) is {step.behind:.2g} nats less likely than its own choice and its "
                f"log-probability differs by {step.difference or 0.0:.2g}"
            )
    return lines


def _tokenizer(questions: Questions, engine_answers: Answers) -> str:
    for i, (ours, other) in enumerate(zip(questions.text_ids, engine_answers.tokenized, strict=True), start=1):
        if ours != other:
            return f"text {i} is {len(other)} tokens {list(other)[:8]}..., not {len(ours)} {list(ours)[:8]}..."
    return "equal"


def _chats(questions: Questions, engine_answers: Answers) -> dict[str, str]:
    results = {}
    for chat, other in zip(questions.chats, engine_answers.rendered, strict=True):
        if isinstance(other, str):
            results[chat.name] = f"refused: {other}"
        else:
            results[chat.name] = "equal" if other == chat.ids else "different"
    return results
