"""How far a pruned model is from its unpruned teacher on held-out tokens: NLL, perplexity, KL, top-1 agreement.

Batch by batch: the teacher's distribution of a batch is computed once, every student is compared with it, and both are
dropped. Nothing is approximated and nothing is kept but sums per trajectory.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.plan import PrunePlan
from moeprune.data.trajectories import TokenSet, collate, plan_batches
from moeprune.evaluation.intervals import Comparison, DomainSums
from moeprune.evaluation.students import Student, pruned_students
from moeprune.models.device_map import device_of_inputs

# (input_ids int64 (batch, length), attention_mask int64 (batch, length)) -> logits (batch, length, vocabulary)
Logits = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Progress = Callable[[int, int], None]  # (tokens done, tokens in all), after every batch

BATCH_LOGITS = 2**28  # numbers in one batch of logits: 1 GiB in float32 for the teacher, and the same for a student
CHUNK_LOGITS = {"cpu": 2**20}  # numbers a softmax works on at a time: what a CPU's cache holds
CHUNK_LOGITS_ELSEWHERE = 2**24
_MEASURES = 4  # rows of the sums: NLL of the teacher, NLL, KL, agreement


def fidelity(
    model: Any,
    plans: Mapping[str, PrunePlan],
    token_set: TokenSet,
    *,
    batch_tokens: int = 8192,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> dict[str, dict[str, float]]:
    """Label -> fidelity metrics of `model` pruned by each plan, against `model` as it is. See `compare_students`."""
    if not plans:
        raise InputError("evaluate: no plan was given, so there is nothing to measure; give {name: plan}")
    students = pruned_students(model, plans)
    comparisons = compare_students(model, students, token_set, batch_tokens=batch_tokens, on_progress=on_progress)
    return {label: comparison.metrics(seed=seed) for label, comparison in comparisons.items()}


def compare_students(
    teacher: Any,
    students: Mapping[str, Student],
    token_set: TokenSet,
    *,
    batch_tokens: int = 8192,
    on_progress: Progress | None = None,
) -> dict[str, Comparison]:
    """Label -> comparison of each student with the teacher, all of them in memory.

    Raises InputError when a plan was made for another model or a domain has nothing to measure.
    """
    logits = {label: logits_of(student.model, student.inside()) for label, student in students.items()}
    batch_tokens = bounded_batch_tokens(teacher, batch_tokens)
    return compare(logits_of(teacher), logits, token_set, batch_tokens=batch_tokens, on_progress=on_progress)


def logits_of(model: Any, inside: AbstractContextManager[Any] | None = None) -> Logits:
    """The model's logits as a function of ids and mask; inputs are moved to its device.

    inside: entered for each call; between two calls the model is what it was.
    """
    context = nullcontext() if inside is None else inside

    def logits(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        with context:
            device = device_of_inputs(model)
            ids, mask = input_ids.to(device), attention_mask.to(device)
            return model(input_ids=ids, attention_mask=mask, use_cache=False).logits

    return logits


def bounded_batch_tokens(model: Any, batch_tokens: int) -> int:
    """`batch_tokens`, or less where the vocabulary would make a batch's logits larger than BATCH_LOGITS."""
    return min(batch_tokens, max(1, BATCH_LOGITS // model.config.get_text_config().vocab_size))


@torch.no_grad()
def compare(
    teacher: Logits,
    students: Mapping[str, Logits],
    token_set: TokenSet,
    *,
    batch_tokens: int = 8192,
    on_progress: Progress | None = None,
) -> dict[str, Comparison]:
    """Label -> comparison of each student with the teacher, on the same tokens.

    A position counts when the token after it is a counted token of the same piece. The logits are held in float32 for
    one batch of the teacher and one of a student: choose `batch_tokens` by the vocabulary (`bounded_batch_tokens`).
    Raises InputError when a domain has no position that counts, when a student has another vocabulary, and
    FloatingPointError when logits are not finite.
    """
    groups = _Trajectories(token_set)
    sums = {label: np.zeros((_MEASURES, len(groups.keys))) for label in students}
    done, total = 0, sum(len(sequence.ids) for sequence in token_set.sequences)
    for indices in plan_batches(token_set.sequences, batch_tokens):
        input_ids, attention_mask, counted = collate([token_set.sequences[index] for index in indices])
        rows, columns = (counted & (attention_mask > 0))[:, 1:].nonzero(as_tuple=True)
        done += int(attention_mask.sum())
        if len(rows):
            owners = groups.owners[indices][rows.numpy()]
            targets = input_ids[:, 1:][rows, columns]
            reference = _Reference(teacher(input_ids, attention_mask), rows, columns)
            for label, student in students.items():
                scores = _scores(reference, student(input_ids, attention_mask), targets, label)
                for measure in range(_MEASURES):
                    sums[label][measure] += np.bincount(owners, weights=scores[measure], minlength=len(groups.keys))
        if on_progress is not None:
            on_progress(done, total)
    return {label: groups.comparison(values) for label, values in sums.items()}


class _Trajectories:
    """Which (domain, trajectory) every piece belongs to, and how many positions of each count."""

    def __init__(self, token_set: TokenSet) -> None:
        sequences = token_set.sequences
        targets = np.array([int(sequence.counted[1:].sum()) for sequence in sequences], dtype=np.int64)
        self.keys = sorted({(sequence.domain, sequence.trajectory) for sequence in sequences})
        number = {key: position for position, key in enumerate(self.keys)}
        self.owners = np.array([number[sequence.domain, sequence.trajectory] for sequence in sequences], dtype=np.int64)
        self.tokens = np.zeros(len(self.keys), dtype=np.int64)
        np.add.at(self.tokens, self.owners, targets)
        # Domains in the order of the data, which is the order of the config.
        self.domains = list(dict.fromkeys(sequence.domain for sequence in sequences))
        empty = set(self.domains) - {key[0] for key, count in zip(self.keys, self.tokens) if count}
        if empty or not self.domains:
            raise InputError(
                f"evaluation domain {', '.join(sorted(empty)) or '(none)'}: no next-token position counts, so there is "
                "nothing to measure; give it longer trajectories or another `count`"
            )

    def comparison(self, values: np.ndarray) -> Comparison:
        """`values` (measures, trajectories) by domain, without trajectories that have no position that counts."""
        domains = {}
        for domain in self.domains:
            chosen = [i for i, key in enumerate(self.keys) if key[0] == domain and self.tokens[i]]
            names = tuple(self.keys[i][1] for i in chosen)
            domains[domain] = DomainSums(names, self.tokens[chosen], *(values[row, chosen] for row in range(_MEASURES)))
        return Comparison(domains)


class _Reference:
    """The teacher at the positions (rows, columns) of one batch, in float32."""

    def __init__(self, logits: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> None:
        self.rows, self.columns = rows, columns
        self.log_probabilities = torch.empty(len(rows), logits.shape[-1], dtype=torch.float32, device=logits.device)
        self.first = torch.empty(len(rows), dtype=torch.int64, device=logits.device)  # the most likely token
        for chunk in self.chunks():
            values = logits[rows[chunk], columns[chunk]].float().log_softmax(dim=-1)
            self.log_probabilities[chunk], self.first[chunk] = values, values.argmax(dim=-1)

    def chunks(self) -> list[slice]:
        values = self.log_probabilities
        step = max(1, CHUNK_LOGITS.get(values.device.type, CHUNK_LOGITS_ELSEWHERE) // values.shape[-1])
        return [slice(start, start + step) for start in range(0, len(values), step)]


def _scores(reference: _Reference, logits: torch.Tensor, targets: torch.Tensor, label: str) -> np.ndarray:
    """(4, positions) float64: NLL of the teacher, NLL of the student, KL(teacher || student), agreement."""
    rows, columns, vocabulary = reference.rows, reference.columns, reference.log_probabilities.shape[-1]
    if logits.shape[-1] != vocabulary:
        raise InputError(
            f"evaluation: {label or 'the model'} has {logits.shape[-1]} logits a token and its teacher {vocabulary}; "
            "they can only be compared when they share one vocabulary"
        )
    out = torch.empty(_MEASURES, len(rows), dtype=torch.float64)
    for chunk in reference.chunks():
        of_teacher = reference.log_probabilities[chunk]
        of_student = logits[rows[chunk], columns[chunk]].float().log_softmax(dim=-1).to(of_teacher.device)
        target = targets[chunk, None].to(of_teacher.device)
        out[0, chunk] = -of_teacher.gather(1, target)[:, 0].double().cpu()
        out[1, chunk] = -of_student.gather(1, target)[:, 0].double().cpu()
        out[2, chunk] = torch.linalg.vecdot(of_teacher.exp(), of_teacher - of_student).double().cpu()
        out[3, chunk] = (reference.first[chunk] == of_student.argmax(dim=-1)).double().cpu()
    if not torch.isfinite(out).all():
        raise FloatingPointError(
            f"evaluation: {label} or its teacher gave logits that are not finite; use another dtype"
        )
    return out.numpy()
