"""Fidelity of a model that is larger than memory: the teacher and its pruned forms in one read of the weights."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch

from moeprune.artifacts.plan import PrunePlan
from moeprune.data.trajectories import TokenSet, collate, plan_batches
from moeprune.evaluation.fidelity import BATCH_LOGITS, Logits, Progress, compare
from moeprune.evaluation.intervals import Comparison
from moeprune.evaluation.students import Student
from moeprune.models.layers import find_moe_layers, moe_layers_if_any
from moeprune.models.pruned import PrunedModel
from moeprune.models.streaming.model import StreamedModel, affordable_tokens
from moeprune.models.streaming.passes import LayerMajor

PASSES = 1024  # forward passes side by side; more are taken in rounds, each of which reads the weights


def compare_students_streamed(
    teacher: StreamedModel,
    students: Mapping[str, Student],
    token_set: TokenSet,
    *,
    fingerprint: str,
    batch_tokens: int = 8192,
    on_progress: Progress | None = None,
) -> dict[str, Comparison]:
    """What `compare_students` gives: all plans in one read of the weights, each other checkpoint in a read of both."""
    plans = {label: student.plan for label, student in students.items() if student.plan is not None}
    options: dict[str, Any] = {"batch_tokens": batch_tokens, "on_progress": on_progress}
    comparisons = {
        label: compare_two_streamed(teacher, student.model, token_set, **options)
        for label, student in students.items()
        if student.plan is None
    }
    if plans:
        comparisons |= compare_streamed(teacher, plans, token_set, fingerprint=fingerprint, **options)
    return {label: comparisons[label] for label in students}


def compare_streamed(
    streamed: StreamedModel,
    plans: Mapping[str, PrunePlan],
    token_set: TokenSet,
    *,
    fingerprint: str,
    batch_tokens: int = 8192,
    scratch: Path | None = None,
    on_progress: Progress | None = None,
) -> dict[str, Comparison]:
    """What `compare_students` gives of plans, with one decoder layer in memory (and its slices, one plan at a time).

    fingerprint: of the checkpoint. scratch: where activations wait (default: the system's temporary directory).
    Raises what `compare_students` raises, and StreamingError when the model does not call its layers once each and in
    order.
    """
    layers = find_moe_layers(streamed.model)
    for plan in plans.values():
        plan.require_model(fingerprint, "model")
        plan.require_layers([layer.info for layer in layers], "model")
    size = min(batch_tokens, _affordable(streamed))
    batches = _counting(token_set, plan_batches(token_set.sequences, size))
    forms = [None, *plans.values()]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moeprune-", dir=scratch)))
        run = stack.enter_context(_SideBySide(streamed, forms, batches, folder, on_progress))
        students = {label: run.logits(form) for form, label in enumerate(plans, start=1)}
        return compare(run.logits(0), students, token_set, batch_tokens=size)


def compare_two_streamed(
    teacher: StreamedModel,
    student: StreamedModel,
    token_set: TokenSet,
    *,
    batch_tokens: int = 8192,
    scratch: Path | None = None,
    on_progress: Progress | None = None,
) -> Comparison:
    """A pruned checkpoint against its teacher, neither of which has to fit into memory."""
    size = min(batch_tokens, _affordable(teacher), _affordable(student))
    batches = _counting(token_set, plan_batches(token_set.sequences, size))
    with ExitStack() as stack:
        logits = []
        for number, model in enumerate((teacher, student)):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moeprune-", dir=scratch)))
            shown = on_progress if number == 0 else None  # one bar: both go through the same batches
            run = stack.enter_context(_SideBySide(model, [None], batches, folder, shown))
            logits.append(run.logits(0))
        return compare(logits[0], {"": logits[1]}, token_set, batch_tokens=size)[""]


def _affordable(streamed: StreamedModel) -> int:
    """Tokens of a batch whose layers are affordable and whose logits take about as much memory as a layer's weights."""
    config: Any = streamed.model.config
    numbers = min(BATCH_LOGITS, max(2**22, streamed.layer_bytes // 16))  # of the teacher and of a student
    by_logits = max(1, numbers // config.get_text_config().vocab_size)
    return min(by_logits, affordable_tokens(streamed, moe_layers_if_any(streamed.model)))


def _counting(token_set: TokenSet, batches: list[list[int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and mask of the batches in which a position counts: `compare` needs no other."""
    collated = [collate([token_set.sequences[index] for index in batch]) for batch in batches]
    return [(ids, mask) for ids, mask, counted in collated if bool((counted & (mask > 0))[:, 1:].any())]


class _SideBySide:
    """Logits of several forms of one model: read batch by batch in order, computed for many batches at once."""

    def __init__(
        self,
        streamed: StreamedModel,
        forms: Sequence[PrunePlan | None],
        batches: Sequence[tuple[torch.Tensor, torch.Tensor]],
        folder: Path,
        on_progress: Progress | None,
    ) -> None:
        self._streamed, self._forms, self._batches, self._folder = streamed, forms, batches, folder
        layers = moe_layers_if_any(streamed.model)
        self._moe = [[la for la in layers if la.is_in(name)] for name in streamed.layers]
        self._round = max(1, PASSES // len(forms))  # batches
        self._on_progress = on_progress
        self._delivered = [0] * len(forms)
        self._stack = ExitStack()
        self._passes: LayerMajor | None = None
        self._first = -1  # batch of the round that is in memory

    def __enter__(self) -> "_SideBySide":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def logits(self, form: int) -> Logits:
        """The logits of one form, for the batches in their order."""

        def logits(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            number = self._delivered[form]
            self._delivered[form] += 1
            assert torch.equal(self._batches[number][0], input_ids), "batches come in the order of the plan"
            first = number - number % self._round
            if first != self._first:
                self._start(first)
            assert self._passes is not None
            return self._passes.finish(self._number(form, number - first))

        return logits

    def _number(self, form: int, batch: int) -> int:
        return form * len(self._batches[self._first : self._first + self._round]) + batch

    def _start(self, first: int) -> None:
        """Take the batches from `first` on through all layers, in every form."""
        self._stack.close()
        self._first = first
        batches = self._batches[first : first + self._round]
        forwards = [self._forward(*batch) for _ in self._forms for batch in batches]
        passes = LayerMajor(self._streamed, forwards, scratch=self._folder)
        self._passes = self._stack.enter_context(passes)
        for position in passes.layers():
            for form, plan in enumerate(self._forms):
                with nullcontext() if plan is None else PrunedModel(self._moe[position], plan):
                    for number in range(len(batches)):
                        passes.advance(self._number(form, number))
            self._report(position)

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor) -> Callable[[], torch.Tensor]:
        def forward() -> torch.Tensor:
            # Copies: what waits belongs to one pass alone.
            own_ids, own_mask = ids.to(self._streamed.device, copy=True), mask.to(self._streamed.device, copy=True)
            return self._streamed.model(input_ids=own_ids, attention_mask=own_mask, use_cache=False).logits

        return forward

    def _report(self, position: int) -> None:
        if self._on_progress is not None:
            sizes = [int(mask.sum()) for _, mask in self._batches]
            before, now = sum(sizes[: self._first]), sum(sizes[self._first : self._first + self._round])
            self._on_progress(before + now * (position + 1) // len(self._streamed.layers), sum(sizes))
