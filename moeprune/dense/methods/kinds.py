"""What a dense method is described by in a config: kind, needs, roles of weights, N:M patterns. Loads no torch."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["prune", "quantise", "joint"]
Needs = Literal["nothing", "norms", "hessian"]  # what a method must know about a layer's inputs
ROLES = ("attention", "dense_mlp", "shared_expert", "routed_expert")


@dataclass(frozen=True)
class Pattern:
    """N:M sparsity: at most `kept` non-zeros in every aligned run of `group` input columns."""

    kept: int
    group: int

    @classmethod
    def parse(cls, text: str) -> "Pattern":
        """`2:4` -> two of four stay. Raises ValueError for anything that is not N:M with 0 < N < M."""
        parts = text.split(":")
        if len(parts) != 2 or not all(part.isascii() and part.isdigit() for part in parts):
            raise ValueError(f"pattern {text!r} is not N:M (N weights stay of every M), e.g. 2:4")
        kept, group = (int(part) for part in parts)
        if not 0 < kept < group:
            raise ValueError(f"pattern {text!r}: N must be at least 1 and less than M, e.g. 2:4")
        return cls(kept, group)

    @property
    def sparsity(self) -> float:
        return 1.0 - self.kept / self.group

    def __str__(self) -> str:
        return f"{self.kept}:{self.group}"


def pruned_count(sparsity: float, total: int) -> int:
    """How many of `total` weights go: the floor, with the last bit of a product like 0.3 * 10 forgiven."""
    return int(sparsity * total + 1e-9 * total)
