"""Who is measured: a model as it is, or a model with only the experts that a plan keeps; and the loop over several."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from moeprune.artifacts.plan import PrunePlan
from moeprune.evaluation.intervals import base_metrics
from moeprune.models.pruned import pruned

Metrics = dict[str, float]  # metric name -> value
Progress = Callable[[int, int], None]  # (students done, students in all)


@dataclass(frozen=True)
class Student:
    """A model to call, and the plan that prunes it while it is measured (None: it is measured as it is)."""

    model: Any
    plan: PrunePlan | None = None

    def inside(self) -> AbstractContextManager[Any]:
        """A context inside which the model is the student; it can be entered many times.

        It holds a copy of the kept experts: keep it for as long as the student is measured, and no longer.
        """
        return nullcontext() if self.plan is None else pruned(self.model, self.plan)


def pruned_students(model: Any, plans: Mapping[str, PrunePlan]) -> dict[str, Student]:
    """Label -> the model pruned by that plan."""
    return {label: Student(model, plan) for label, plan in plans.items()}


def with_base(
    measure: Callable[[Any], Metrics],
    teacher: Any,
    students: Mapping[str, Student],
    *,
    base: Metrics | None = None,
    on_progress: Progress | None = None,
) -> dict[str, Metrics]:
    """Label -> what `measure` gives for each student, with `/base` for the teacher, which is measured once.

    base: what `measure` gave for the teacher, where that is known.
    """
    of_base = base_metrics(measure(teacher) if base is None else base)
    metrics = {}
    for done, (label, student) in enumerate(students.items(), start=1):
        with student.inside():
            metrics[label] = measure(student.model) | of_base
        if on_progress is not None:
            on_progress(done, len(students))
    return metrics
