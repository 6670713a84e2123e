"""Tables on disk that list the experts of every token id: their values are expert ids and follow the experts."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moeprune.artifacts.errors import InputError
from moeprune.checkpoint.headers import Entry

_TYPES = {"I64": "<i8", "I32": "<i4"}


def read_table(file: Path, entry: Entry) -> np.ndarray:
    """Expert ids (tokens, k), as they are stored. Raises InputError for another type or a number of axes."""
    if entry.dtype not in _TYPES or len(entry.shape) != 2:
        raise InputError(
            f"{entry.name}: expert ids by token, stored as {entry.dtype} {list(entry.shape)}; known: (tokens, k) of "
            f"{' or '.join(_TYPES)}"
        )
    with file.open("rb") as source:
        source.seek(entry.start)
        return np.frombuffer(source.read(entry.size), dtype=_TYPES[entry.dtype]).reshape(entry.shape)


def rewritten_table(file: Path, entry: Entry, order: Sequence[int], num_experts: int) -> bytes:
    """The table's bytes when expert j is what expert `order[j]` was; see models.expert_table for removed ones."""
    import torch

    from moeprune.models.expert_table import remapped

    table = torch.from_numpy(read_table(file, entry).copy())
    return remapped(table, order, num_experts).numpy().tobytes()


def replaced_share(file: Path, entry: Entry, kept: Sequence[int]) -> float:
    """The share of entries that name an expert which is not kept."""
    return float(np.isin(read_table(file, entry), kept, invert=True).mean())
