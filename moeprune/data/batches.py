"""Sequences -> batches in which padding is known and counts for nothing."""

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from moeprune.data.trajectories import Sequence

if TYPE_CHECKING:
    import torch

PAD_ID = 0  # any id does: the attention mask says what is padding


def plan_batches(sequences: Items[Sequence], batch_tokens: int) -> list[list[int]]:
    """Indices of every batch: sequences of one domain and one half, of like length, at most `batch_tokens` padded.

    A sequence longer than `batch_tokens` is a batch of its own. The same sequences give the same batches in
    whatever order they come.
    """
    order = sorted(range(len(sequences)), key=lambda index: _place(sequences[index]))
    batches: list[list[int]] = []
    for index in order:
        sequence = sequences[index]
        last = sequences[batches[-1][0]] if batches else None
        together = last is not None and (last.domain, last.half) == (sequence.domain, sequence.half)
        # ascending lengths: the new sequence is the longest of its batch
        if together and (len(batches[-1]) + 1) * len(sequence.ids) <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def _place(sequence: Sequence) -> tuple[str, str, int, str, int, bytes]:
    counted = sequence.counted.tobytes()  # two records with the same ids may count different tokens
    return (sequence.domain, sequence.half, len(sequence.ids), sequence.trajectory, sequence.piece, counted)


def collate(sequences: Items[Sequence]) -> tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]:
    """Input ids int64, attention mask int64 and counted bool, each (sequences, longest), padded on the right."""
    import torch

    shape = (len(sequences), max(len(sequence.ids) for sequence in sequences))
    input_ids = torch.full(shape, PAD_ID, dtype=torch.int64)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    counted = torch.zeros(shape, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        length = len(sequence.ids)
        input_ids[row, :length] = torch.from_numpy(sequence.ids.astype("int64"))
        attention_mask[row, :length] = 1
        counted[row, :length] = torch.from_numpy(sequence.counted)
    return input_ids, attention_mask, counted
