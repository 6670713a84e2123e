"""How a sweep decides which weights go."""

from dataclasses import dataclass
from typing import Protocol

import torch

from moeprune.dense.patterns import Pattern, pruned_count, smallest_in_groups, smallest_per_row


class Choice(Protocol):
    """How a sweep decides what goes: asked for every run of `unit` columns (None: a block), as they are by then."""

    @property
    def unit(self) -> int | None: ...

    def prune(self, values: torch.Tensor, costs: torch.Tensor, start: int) -> torch.Tensor:
        """True (columns, out) where a weight goes; values (columns, out), costs R_ii (columns,) from column `start`."""
        ...


@dataclass
class Ratio:
    """SparseGPT unstructured: the smallest (w R_ii)^2 over all rows of a block; the blocks' counts add up exactly."""

    sparsity: float
    unit: None = None

    def prune(self, values: torch.Tensor, costs: torch.Tensor, start: int) -> torch.Tensor:
        rows = values.shape[1]
        stop = start + values.shape[0]
        count = pruned_count(self.sparsity, stop * rows) - pruned_count(self.sparsity, start * rows)
        scores = (values * costs[:, None]).abs_()
        return smallest_per_row(scores.flatten()[None], count).view_as(values)


@dataclass
class Groups:
    """SparseGPT N:M: in every row the smallest (w R_ii)^2 of each run of M, chosen when the sweep reaches it."""

    pattern: Pattern

    @property
    def unit(self) -> int:
        return self.pattern.group

    def prune(self, values: torch.Tensor, costs: torch.Tensor, start: int) -> torch.Tensor:
        return smallest_in_groups((values * costs[:, None]).abs_(), self.pattern, dim=0)


@dataclass
class Fixed:
    """A mask (out, in) that was decided before, in the order of the sweep."""

    mask: torch.Tensor
    unit: None = None

    def prune(self, values: torch.Tensor, costs: torch.Tensor, start: int) -> torch.Tensor:
        return ~self.mask[:, start : start + values.shape[0]].T
