"""A trajectory in tokens, with who wrote each of them."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Encoded:
    """A whole trajectory in tokens."""

    ids: np.ndarray  # (tokens,) int32
    roles: (
        np.ndarray
    )  # (tokens,) words: system, user, assistant, tool, template, text, prompt, completion, ids, unknown
    counted: np.ndarray  # (tokens,) bool
    turns: tuple[tuple[str, int, int], ...] = ()  # role, first and last + 1 token of assistant and tool turns
    changes: Mapping[str, int] = field(default_factory=dict)

    @property
    def trajectory(self) -> str:
        """sha256 of the ids as little-endian int64: the identity of a trajectory."""
        return hashlib.sha256(self.ids.astype("<i8").tobytes()).hexdigest()
