"""Sequences -> batches in which padding is known and counts for nothing.

A sequence is padded to a length that its own length decides, and shares a batch only with sequences of the same padded
length. So what a kernel computes for it does not depend on its neighbours: on CPU, in float32, attention and matrix
products give the same bits whatever the batch size, and no near tie in a router falls to the other side.
"""

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from moeprune.data.trajectories import Sequence

if TYPE_CHECKING:
    import torch

PAD_ID = 0  # any id does: the attention mask says what is padding


def padded_length(length: int) -> int:
    """The length a sequence of this length is padded to: eight steps an octave, a multiple of 8.

    So at most 1/8 is padding from 64 tokens on. A multiple of 8, because the last rows of a matrix product that are no
    full block of 4 take another path on CPU.
    """
    step = max(8, 2 ** (length.bit_length() - 4))
    return -(-length // step) * step


def plan_batches(sequences: Items[Sequence], batch_tokens: int) -> list[list[int]]:
    """Indices of every batch: sequences of one domain, one half and one padded length, at most `batch_tokens` padded.

    A sequence longer than `batch_tokens` is a batch of its own. The same sequences give the same batches in
    whatever order they come.
    """
    order = sorted(range(len(sequences)), key=lambda index: _place(sequences[index]))
    batches: list[list[int]] = []
    for index in order:
        sequence = sequences[index]
        last = sequences[batches[-1][0]] if batches else None
        together = last is not None and _group(last) == _group(sequence)
        if together and (len(batches[-1]) + 1) * padded_length(len(sequence.ids)) <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def _group(sequence: Sequence) -> tuple[str, str, int]:
    return sequence.domain, sequence.half, padded_length(len(sequence.ids))


def _place(sequence: Sequence) -> tuple[str, str, int, str, int, bytes]:
    counted = sequence.counted.tobytes()  # two records with the same ids may count different tokens
    return (sequence.domain, sequence.half, len(sequence.ids), sequence.trajectory, sequence.piece, counted)


def collate(sequences: Items[Sequence]) -> tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]:
    """Input ids int64, attention mask int64 and counted bool, each (sequences, padded length), padded on the right."""
    import torch

    shape = (len(sequences), padded_length(max(len(sequence.ids) for sequence in sequences)))
    input_ids = torch.full(shape, PAD_ID, dtype=torch.int64)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    counted = torch.zeros(shape, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        length = len(sequence.ids)
        input_ids[row, :length] = torch.from_numpy(sequence.ids.astype("int64"))
        attention_mask[row, :length] = 1
        counted[row, :length] = torch.from_numpy(sequence.counted)
    return input_ids, attention_mask, counted
