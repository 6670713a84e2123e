"""The sweep against the papers' loops, and identities that hold whatever the numbers are."""

import pytest
import torch

from moeprune.dense.methods.codes import IntegerCodes
from moeprune.dense.methods.kinds import Pattern
from moeprune.dense.methods.patterns import Fixed, Groups, Ratio
from moeprune.dense.methods.sweep import NotPositiveDefinite, factorise, sweep
from tests.dense import naive
from tests.dense.layers import layer


def nearly_all_equal(ours, theirs, weight, statistics):
    """Equal but for rounding ties, which float32 and float64 break differently and which move the rest of their row.

    The largest weight of a symmetric group lies exactly between two codes, so ties are common.
    """
    same = float(torch.isclose(ours.double(), theirs, atol=2e-3).double().mean())
    errors = [naive.output_error(weight, other, statistics.hessian) for other in (ours, theirs)]
    return same > 0.9 and abs(errors[0] / errors[1] - 1) < 0.02


@pytest.mark.parametrize("columns", [96, 128, 300])
@pytest.mark.parametrize("sparsity", [0.3, 0.5])
def test_unstructured_sweep_is_sparsegpt(columns, sparsity):
    weight, statistics, _ = layer(columns=columns)
    swept = sweep(weight, factorise(statistics.hessian, 0.01), choice=Ratio(sparsity))
    expected, keep = naive.sweep(weight, statistics.hessian, 0.01, sparsity=sparsity)
    assert torch.equal(swept.mask, keep)
    assert torch.allclose(swept.weight.double(), expected, atol=2e-3)
    assert int((~swept.mask).sum()) == int(sparsity * weight.numel() + 1e-6)


@pytest.mark.parametrize("pattern", ["2:4", "4:8", "1:4", "3:6", "5:20"])
def test_group_sweep_is_sparsegpt(pattern):
    parsed = Pattern.parse(pattern)
    weight, statistics, _ = layer(columns=240)
    swept = sweep(weight, factorise(statistics.hessian, 0.01), choice=Groups(parsed))
    expected, keep = naive.sweep(weight, statistics.hessian, 0.01, pattern=(parsed.kept, parsed.group))
    assert torch.equal(swept.mask, keep)
    assert torch.allclose(swept.weight.double(), expected, atol=2e-3)


@pytest.mark.parametrize(("columns", "group"), [(256, 32), (256, 256), (288, 48), (512, 256), (130, 26)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_quantising_sweep_is_gptq(columns, group, symmetric):
    weight, statistics, _ = layer(rows=12, columns=columns, tokens=900)
    codes = IntegerCodes(4, symmetric, group)
    swept = sweep(weight, factorise(statistics.hessian, 0.01), codes=codes)
    expected, _ = naive.sweep(weight, statistics.hessian, 0.01, bits=4, group=group, symmetric=symmetric)
    assert nearly_all_equal(swept.weight, expected, weight, statistics)
    assert swept.scale.shape == (12, columns // group)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("how", [{"sparsity": 0.5}, {"pattern": (2, 4)}, {"pattern": (4, 8)}])
def test_joint_sweep_is_the_papers(how, symmetric):
    weight, statistics, _ = layer(rows=12)
    choice = Ratio(0.5) if "sparsity" in how else Groups(Pattern(*how["pattern"]))
    codes = IntegerCodes(4, symmetric, 32)
    swept = sweep(weight, factorise(statistics.hessian, 0.01), choice=choice, codes=codes)
    expected, keep = naive.sweep(weight, statistics.hessian, 0.01, bits=4, group=32, symmetric=symmetric, **how)
    assert float((swept.mask == keep).double().mean()) > 0.98
    assert nearly_all_equal(swept.weight, expected, weight, statistics)
    assert bool(torch.all(swept.weight[~swept.mask] == 0))


def test_a_given_mask_is_updated_as_in_the_paper():
    weight, statistics, _ = layer()
    mask = torch.rand(weight.shape, generator=torch.Generator().manual_seed(1)) > 0.5
    swept = sweep(weight, factorise(statistics.hessian, 0.01), choice=Fixed(mask))
    expected, _ = naive.sweep(weight, statistics.hessian, 0.01, mask=mask)
    assert torch.allclose(swept.weight.double(), expected, atol=2e-3)


def test_last_column_is_the_least_squares_answer():
    """Dropping everything but the last column must leave it at the value that least squares gives, damped."""
    weight, statistics, _ = layer(rows=5, columns=20, tokens=60)
    mask = torch.zeros_like(weight, dtype=torch.bool)
    mask[:, -1] = True
    swept = sweep(weight, factorise(statistics.hessian, 0.01), choice=Fixed(mask))
    hessian = statistics.hessian.double()
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(20)
    expected = (weight.double() @ hessian[:, -1]) / hessian[-1, -1]
    assert torch.allclose(swept.weight[:, -1].double(), expected, atol=1e-4)


def test_static_activation_order_keeps_the_stored_layout():
    """Codes and scales are those of the original columns: (code - zero) * scale rebuilds the weight exactly."""
    weight, statistics, _ = layer(rows=16)
    order = torch.argsort(statistics.hessian.diagonal(), descending=True)
    for symmetric in (True, False):
        codes = IntegerCodes(4, symmetric, 32)
        swept = sweep(weight, factorise(statistics.hessian, 0.01, order=order), codes=codes, order=order)
        scale, zero = codes.fit(weight.view(16, -1, 32), dim=2)
        assert torch.equal(swept.scale, scale)
        scale = scale.repeat_interleave(32, 1)
        zero = torch.zeros_like(scale) if zero is None else zero.repeat_interleave(32, 1)
        codes = (swept.weight / scale).round() + zero
        assert int(codes.min()) >= -8
        assert int(codes.max()) <= 7
        assert torch.equal((codes - zero) * scale, swept.weight)


def test_a_scale_search_finds_the_candidate_with_the_least_squared_error():
    values = torch.randn(6, 128, generator=torch.Generator().manual_seed(5))
    for symmetric in (True, False):
        codes = IntegerCodes(4, symmetric, 128, search=True)
        scale, zero = codes.fit(values, dim=1)
        zero = 0 if zero is None else zero[:, None]
        error = (
            (((values / scale[:, None] + zero).round().clamp(-8, 7) - zero) * scale[:, None] - values).square().sum(1)
        )
        for row in range(6):
            candidates = []
            for shrink in (1, 0.95, 0.9, 0.85, 0.8):
                unit, origin = naive.integer_scale(values[row].double() * shrink, 4, symmetric)
                rounded = [naive.to_integer(float(v), unit, origin, 4) for v in values[row]]
                candidates.append(float((torch.tensor(rounded) - values[row]).square().sum()))
            assert float(error[row]) == pytest.approx(min(candidates), rel=1e-3)
            assert min(candidates) <= candidates[0]


def test_order_of_columns_does_not_matter_to_a_given_mask_at_the_end():
    """Sweeping permuted columns with order=permutation equals permuting by hand."""
    weight, statistics, _ = layer(rows=8, columns=64)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2))
    mask = torch.rand(weight.shape, generator=torch.Generator().manual_seed(3)) > 0.4
    factor = factorise(statistics.hessian, 0.01, order=order)
    by_order = sweep(weight, factor, held=mask, order=order)
    by_hand = sweep(weight[:, order], factor, held=mask[:, order])
    assert torch.equal(by_order.weight[:, order], by_hand.weight)
    assert torch.equal(by_order.mask, mask)


@pytest.mark.parametrize("choice", [Ratio(0.3), Groups(Pattern(3, 4))])
def test_what_was_dropped_before_stays_dropped_and_counts(choice):
    weight, statistics, _ = layer()
    held = torch.rand(weight.shape, generator=torch.Generator().manual_seed(4)) > 0.1
    swept = sweep(weight * held, factorise(statistics.hessian, 0.01), choice=choice, held=held)
    assert not bool((swept.mask & ~held).any())
    assert bool(torch.all(swept.weight[~held] == 0))
    if isinstance(choice, Ratio):
        assert int((~swept.mask).sum()) == int(0.3 * weight.numel() + 1e-6)


def test_dead_inputs_become_zero_columns_and_cost_nothing():
    weight, statistics, _ = layer(dead=(0, 7, 255))
    swept = sweep(weight, factorise(statistics.hessian, 0.01), choice=Ratio(0.5))
    expected, keep = naive.sweep(weight, statistics.hessian, 0.01, sparsity=0.5)
    assert bool(torch.all(swept.weight[:, [0, 7, 255]] == 0))
    assert torch.equal(swept.mask, keep)
    assert torch.allclose(swept.weight.double(), expected, atol=2e-3)
    assert torch.isfinite(swept.weight).all()


def test_damping_is_raised_in_steps_and_capped():
    """With a negative direction a little damping does not help and more does; beyond the cap it is refused."""
    _, statistics, _ = layer(columns=32)
    hessian = statistics.hessian
    mean = float(hessian.diagonal().mean())
    vector = torch.linalg.eigh(hessian).eigenvectors[:, 0]
    value = float(torch.linalg.eigvalsh(hessian)[0])
    slightly = hessian - (value + 0.05 * mean) * torch.outer(vector, vector)
    factor = factorise(slightly, 0.01)
    assert factor.steps == 1
    assert factor.damping == pytest.approx(0.1)
    with pytest.raises(NotPositiveDefinite, match="damping"):
        factorise(hessian - (value + 2 * mean) * torch.outer(vector, vector), 0.01)


def test_the_arguments_are_left_alone():
    weight, statistics, _ = layer(rows=1)
    before, hessian = weight.clone(), statistics.hessian.clone()
    sweep(weight, factorise(statistics.hessian, 0.01), choice=Ratio(0.5), codes=IntegerCodes(4, True, 32))
    assert torch.equal(weight, before)
    assert torch.equal(statistics.hessian, hessian)
