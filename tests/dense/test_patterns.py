"""Exact choice of the smallest, whatever the ties."""

import pytest
import torch

from moeprune.dense.methods.kinds import Pattern
from moeprune.dense.methods.patterns import smallest_in_groups, smallest_per_row
from moeprune.dense.methods.result import follows, holds_mask, sparsity_of
from tests.dense.naive import drop_by_group, drop_smallest


def many_ties(rows, columns, seed):
    return torch.randint(0, 4, (rows, columns), generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize("count", [0, 1, 7, 15, 16])
def test_smallest_per_row_is_exact_and_ties_go_to_the_lowest_column(count):
    scores = many_ties(20, 16, count)
    expected = torch.stack([~drop_smallest(row, count) for row in scores])
    assert torch.equal(smallest_per_row(scores, count), expected)


@pytest.mark.parametrize("pattern", ["2:4", "4:8", "1:3", "7:16"])
@pytest.mark.parametrize("dim", [0, 1])
def test_smallest_in_groups_is_exact_and_ties_go_to_the_lowest_column(pattern, dim):
    parsed = Pattern.parse(pattern)
    scores = many_ties(9, parsed.group * 5, 3)
    expected = ~drop_by_group(scores, (parsed.kept, parsed.group))
    if dim == 0:
        scores, expected = scores.T, expected.T
    assert torch.equal(smallest_in_groups(scores, parsed, dim=dim), expected)


def test_the_fast_selection_finds_torchs_number():
    scores = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0))
    for count in (1, 500, 1000):
        expected = scores <= scores.kthvalue(count, dim=1, keepdim=True).values
        assert torch.equal(smallest_per_row(scores, count), expected)


@pytest.mark.parametrize("text", ["2-4", "4:4", "0:4", "5:4", "2:4:8", "", "a:b", "-1:4", "2:", "²:4"])
def test_patterns_that_mean_nothing_are_refused(text):
    with pytest.raises(ValueError, match="pattern"):
        Pattern.parse(text)


def test_counts_see_one_weight_too_many():
    weight = torch.tensor([[1.0, 0, 2, 0, 0, 0, 0, 3]])
    mask = weight != 0
    assert sparsity_of(weight) == 5 / 8
    assert follows(weight, Pattern(2, 4))
    assert holds_mask(weight, mask)
    weight[0, 1] = 1e-30
    assert not follows(weight, Pattern(2, 4))
    assert not holds_mask(weight, mask)
