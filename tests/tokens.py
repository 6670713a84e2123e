"""Token sets made in a test: pieces of random ids, with the trajectory's digest as the data room computes it."""

import hashlib
from collections.abc import Sequence as Items

import numpy as np

from moeprune.data.trajectories import Sequence, TokenSet


def token_set(pieces: Items[Items[int]], *, domain: str = "all", counted: Items[Items[bool]] | None = None) -> TokenSet:
    """One trajectory a piece; everything counts unless `counted` says otherwise."""
    sequences = []
    for number, ids in enumerate(pieces):
        array = np.asarray(ids, dtype=np.int32)
        mask = np.ones(len(array), dtype=bool) if counted is None else np.asarray(counted[number], dtype=bool)
        digest = hashlib.sha256(array.astype("<i8").tobytes()).hexdigest()
        sequences.append(Sequence(array, mask, domain, digest))
    total = sum(len(sequence.ids) for sequence in sequences)
    return TokenSet(tuple(sequences), {domain: {"tokens": total, "counted": total}})


def random_pieces(lengths: Items[int], *, vocabulary: int = 100, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(3, vocabulary, size=length).tolist() for length in lengths]
