"""All measures of `evaluation:`, of several students on the same data; the teacher is measured once for all of them.

A student is a pruned model, its teacher the model as it is. Fidelity can be measured in memory or layer by layer. All
other measures generate token by token, so they need teacher and students in memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from moeprune.console import progress, say
from moeprune.data.trajectories import TokenSet
from moeprune.evaluation.agent import Question, agent_metrics
from moeprune.evaluation.decoding import end_tokens
from moeprune.evaluation.fidelity import compare_students
from moeprune.evaluation.fidelity_streamed import compare_students_streamed
from moeprune.evaluation.intervals import Comparison
from moeprune.evaluation.loops import loop_metrics, open_prompts
from moeprune.evaluation.options import EvaluationOptions
from moeprune.evaluation.students import Metrics, Student, with_base
from moeprune.models.loading import LoadedModel
from moeprune.models.streaming.model import StreamedModel

Measured = tuple[dict[str, Metrics], list[str]]  # label -> metrics; what their readers must know
Questions = Mapping[str, tuple[Sequence[Question], Sequence[str]]]  # task -> its questions, and warnings about them


def compared(
    teacher: Any, students: Mapping[str, Student], tokens: TokenSet, *, fingerprint: str, batch_tokens: int
) -> dict[str, Comparison]:
    """Label -> fidelity of each student to the teacher: layer by layer where the teacher is a StreamedModel.

    fingerprint: of the teacher's checkpoint.
    """
    with progress("evaluating") as advance:
        if isinstance(teacher, StreamedModel):
            return compare_students_streamed(
                teacher, students, tokens, fingerprint=fingerprint, batch_tokens=batch_tokens, on_progress=advance
            )
        return compare_students(teacher, students, tokens, batch_tokens=batch_tokens, on_progress=advance)


def measure(
    comparisons: Mapping[str, Comparison],
    tokens: TokenSet,
    options: EvaluationOptions,
    *,
    loaded: LoadedModel | None,
    students: Mapping[str, Student],
    questions: Questions,
) -> Measured:
    """Label -> metrics of every student: its fidelity, and what `options` names beside it.

    comparisons: fidelity of the students, which is not measured again. loaded: the teacher and its tokenizer; without
    it fidelity is all.
    """
    metrics = {label: comparison.metrics() for label, comparison in comparisons.items()}
    warnings = [*tokens.warnings, *next(iter(comparisons.values())).warnings]
    if loaded is None:
        return metrics, warnings
    for name, measure_one, notes in _generating(loaded, tokens, options, questions):
        say(f"evaluate: {name}")
        for label, values in with_base(measure_one, loaded.model, students).items():
            metrics[label] |= values
        warnings += notes
    if options.speed:
        say("evaluate: speed")
        from moeprune.evaluation.speed import speed

        for label, values in speed(loaded.model, students, tokens).items():
            metrics[label] |= values
    return metrics, warnings


def _generating(
    loaded: LoadedModel, tokens: TokenSet, options: EvaluationOptions, questions: Questions
) -> Iterator[tuple[str, Callable[[Any], Metrics], Sequence[str]]]:
    """(name, model -> metrics, warnings) of every measure that lets one model after the other generate."""
    tokenizer = loaded.tokenizer
    for task in options.tasks:
        items, notes = questions[task]
        yield f"task {task}", partial(agent_metrics, tokenizer=tokenizer, questions=items, name=task), notes
    if options.code is not None:
        from moeprune.evaluation.code import code_metrics, code_warnings

        name = f"programs of {options.code.problems}"
        yield name, partial(code_metrics, tokenizer=tokenizer, options=options.code), code_warnings(options.code)
    if options.loops:
        prompts = open_prompts(tokens, end_ids=end_tokens(loaded.model, tokenizer))
        yield "loop rate", partial(loop_metrics, tokenizer=tokenizer, prompts=prompts), ()
    if options.harness:
        from moeprune.evaluation.harness import harness_metrics

        name = f"lm-eval {', '.join(options.harness)}"
        yield name, partial(harness_metrics, tokenizer=tokenizer, tasks=options.harness), ()
