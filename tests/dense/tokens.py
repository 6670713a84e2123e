"""Small token sets for tiny models, of unequal lengths so that batches have padding."""

import hashlib

import numpy as np

from moeprune.data.trajectories import Sequence, TokenSet


def token_set(lengths=(9, 17, 24, 24, 30, 40), *, seed=0, vocabulary=(10, 100), uncounted=0):
    """Random sequences; the first `uncounted` tokens of each do not count."""
    generator = np.random.default_rng(seed)
    sequences = []
    for length in lengths:
        ids = generator.integers(*vocabulary, size=length).astype(np.int32)
        counted = np.arange(length) >= uncounted
        trajectory = hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()
        sequences.append(Sequence(ids, counted, "test", trajectory))
    return TokenSet(tuple(sequences), {})
