"""Which weights go: exact choice of the smallest scores, ties to the lowest column, and how a sweep decides."""

from dataclasses import dataclass
from typing import Protocol

import torch

from moeprune.dense.methods.kinds import Pattern, pruned_count

_SMALL_GROUP = 8  # up to here ranks come from pairwise comparisons, which beat sorting


def smallest_per_row(scores: torch.Tensor, count: int) -> torch.Tensor:
    """True at the `count` smallest scores of each row of (rows, columns); exactly `count` of them."""
    if count <= 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    threshold = _kth_smallest(scores, count)
    smallest = scores <= threshold
    if int(torch.count_nonzero(smallest)) == count * scores.shape[0]:
        return smallest
    excess = smallest.sum(1) - count  # ties at the threshold: the last ones of the row stay
    tied = scores == threshold
    later = tied.flip(1).cumsum(1).flip(1)
    return smallest & ~(tied & (later <= excess[:, None]))


def smallest_in_groups(scores: torch.Tensor, pattern: Pattern, *, dim: int) -> torch.Tensor:
    """True at the `group - kept` smallest scores of each aligned run of `group` along `dim`; same shape as scores."""
    pruned = pattern.group - pattern.kept
    groups = scores.unflatten(dim, (-1, pattern.group))
    axis = dim + 1
    if pattern.group > _SMALL_GROUP:
        order = torch.argsort(groups, dim=axis, stable=True).narrow(axis, 0, pruned)
        chosen = torch.zeros_like(groups, dtype=torch.bool).scatter_(axis, order, True)
    else:
        ranks = _ranks([part.contiguous() for part in groups.unbind(axis)])
        chosen = torch.stack([rank < pruned for rank in ranks], dim=axis)
    return chosen.flatten(dim, axis)


def _ranks(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Place of each tensor's entry among the entries of all tensors at the same position, 0 for the smallest."""
    ranks = [torch.zeros_like(part, dtype=torch.uint8) for part in parts]
    for first in range(len(parts)):
        for second in range(first + 1, len(parts)):
            second_is_less = parts[second] < parts[first]
            ranks[first].add_(second_is_less)
            ranks[second].add_(second_is_less.logical_not_())
    return ranks


def _kth_smallest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The `count`-th smallest of each row, (rows, 1)."""
    if scores.device.type == "cpu":
        # numpy's partition uses vector instructions: ten times faster than torch's selection, the same number
        rows = scores.detach().numpy().copy()
        rows.partition(count - 1, axis=1)
        return torch.from_numpy(rows[:, count - 1 : count].copy())
    return scores.kthvalue(count, dim=1, keepdim=True).values


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
