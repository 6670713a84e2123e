"""Every method of the union: one contract for all, and each against its formula."""

import math

import pytest
import torch

from moeprune.artifacts.errors import InputError
from moeprune.dense.methods.codes import NF4_VALUES
from moeprune.dense.methods.inputs import InputStatistics
from moeprune.dense.methods.kinds import Pattern
from moeprune.dense.methods.pruning import Magnitude, SparseGPT, Wanda, WandaUpdate
from moeprune.dense.methods.quantising import AWQ, FP8, GPTQ, NF4, RTN, Joint
from moeprune.dense.methods.result import follows, holds_mask, sparsity_of
from moeprune.dense.options import METHODS
from tests.dense import naive
from tests.dense.layers import layer

PRUNING = [Magnitude, Wanda, WandaUpdate, SparseGPT, Joint]
QUANTISING = [Joint, GPTQ, AWQ, RTN, FP8, NF4]
DATA = [method for method in METHODS if method.needs != "nothing"]


def configured(method, **fields):
    return method(**{"group_size": 32, **fields} if "group_size" in method.model_fields else fields)


def rebuilt(quantised, columns):
    """(scale, zero point) of every element, from the stored parts alone, for integer layouts."""

    def spread(part):
        return part.repeat_interleave(columns // part.shape[1], 1)

    return spread(quantised.scale), 0 if quantised.zero is None else spread(quantised.zero)


@pytest.mark.parametrize("method", METHODS)
def test_one_contract_for_all(method):
    """Shapes, dtype and finiteness; the argument is left alone; the same call gives the same bits."""
    weight, statistics, _ = layer()
    before = weight.clone()
    result = configured(method).compress(weight, statistics)
    again = configured(method).compress(weight, statistics)
    assert torch.equal(weight, before)
    assert result.weight.shape == weight.shape
    assert result.weight.dtype == torch.float32
    assert torch.isfinite(result.weight).all()
    assert not torch.equal(result.weight, weight)
    assert torch.equal(result.weight, again.weight)
    assert (result.mask is not None) == (method in PRUNING)
    assert (result.quantised is not None) == (method in QUANTISING)
    assert result.fallback is None


@pytest.mark.parametrize("method", PRUNING)
@pytest.mark.parametrize("pattern", [None, "2:4", "4:8"])
def test_pruning_reaches_exactly_what_was_asked(method, pattern):
    weight, statistics, _ = layer()
    result = configured(method, **({"sparsity": 0.6} if pattern is None else {"pattern": pattern})).compress(
        weight, statistics
    )
    share = 0.6 if pattern is None else 0.5
    assert abs(float((~result.mask).double().mean()) - share) < 1 / weight.shape[1]
    assert holds_mask(result.weight, result.mask)
    if pattern is not None:
        assert follows(result.weight, Pattern.parse(pattern))


@pytest.mark.parametrize("method", [*QUANTISING, WandaUpdate, SparseGPT, Wanda, Magnitude])
@pytest.mark.parametrize("symmetric", [True, False])
def test_what_an_earlier_step_dropped_stays_exactly_zero(method, symmetric):
    weight, statistics, _ = layer()
    pruned = SparseGPT(pattern="2:4").compress(weight, statistics)
    fields = {"symmetric": symmetric} if "symmetric" in method.model_fields else {}
    result = configured(method, **fields).compress(pruned.weight, statistics, held=pruned.mask)
    assert holds_mask(result.weight, pruned.mask)
    assert follows(result.weight, Pattern(2, 4))
    assert not bool((result.mask & ~pruned.mask).any())


@pytest.mark.parametrize("method", [GPTQ, RTN, AWQ, Joint])
@pytest.mark.parametrize("group", [None, 32])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_integer_layouts_rebuild_the_weight_bit_for_bit(method, group, symmetric, bits):
    weight, statistics, _ = layer(rows=8)
    options = method(bits=bits, group_size=group, symmetric=symmetric)
    result = options.compress(weight, statistics, scale_dtype=torch.bfloat16)
    scale, zero = rebuilt(result.quantised, weight.shape[1])
    stored = result.weight if result.quantised.column_scale is None else result.weight * result.quantised.column_scale
    codes = (stored / scale + zero).round()
    assert torch.equal(scale, scale.bfloat16().float())
    assert -(2 ** (bits - 1)) <= int(codes.min())
    assert int(codes.max()) < 2 ** (bits - 1)
    back = (codes - zero) * scale
    if result.quantised.column_scale is not None:
        back = back / result.quantised.column_scale
    assert torch.equal(back, result.weight)


def test_wanda_is_its_formula():
    weight, statistics, inputs = layer(rows=6, columns=16)
    scores = weight.double().abs() * inputs.double().norm(dim=0)
    for options, keep in (
        (Wanda(sparsity=0.5), torch.stack([naive.drop_smallest(row, 8) for row in scores])),
        (Wanda(pattern="1:4"), naive.drop_by_group(scores, (1, 4))),
    ):
        result = options.compress(weight, statistics)
        assert torch.equal(result.mask, keep)
        assert torch.equal(result.weight, weight * keep)


def test_magnitude_is_its_formula():
    weight, statistics, _ = layer(rows=6, columns=16)
    keep = torch.stack([naive.drop_smallest(row.abs(), 4) for row in weight])
    assert torch.equal(Magnitude(sparsity=0.25).compress(weight, statistics).weight, weight * keep)


@pytest.mark.parametrize("symmetric", [True, False])
def test_rounding_to_nearest_is_its_formula(symmetric):
    weight, statistics, _ = layer(rows=4, columns=64)
    result = RTN(bits=4, group_size=16, symmetric=symmetric).compress(weight, statistics)
    for row in range(4):
        for start in range(0, 64, 16):
            values = weight[row, start : start + 16]
            scale, zero = naive.integer_scale(values, 4, symmetric)
            expected = [naive.to_integer(float(value), scale, zero, 4) for value in values]
            at = float(values.abs().max()) if symmetric else None  # it lies between two codes: either is right
            for ours, theirs, value in zip(result.weight[row, start : start + 16], expected, values, strict=True):
                assert abs(ours - theirs) < 1e-5 or abs(float(value)) == at


def test_float8_takes_the_nearest_representable_number():
    """All 253 finite e4m3 numbers by brute force, one scale a row and one in all."""
    weight, statistics, _ = layer(rows=3, columns=40)
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[torch.isfinite(numbers)]
    for options, scale in (
        (FP8(), weight.abs().amax(1, keepdim=True) / 448),
        (FP8(scale="tensor"), weight.abs().max().view(1, 1) / 448),
    ):
        result = options.compress(weight, statistics)
        assert torch.allclose(result.quantised.scale, scale)
        nearest = ((weight / scale)[..., None] - numbers).abs().amin(-1)
        assert torch.allclose((weight / scale - result.weight / scale).abs(), nearest, atol=1e-4)


def test_nf4_takes_the_nearest_of_the_published_values():
    """Blocks of the flattened weight; values and the outermost codes per 2305.14314, appendix E."""
    assert len(NF4_VALUES) == 16
    assert NF4_VALUES[0] == -1
    assert NF4_VALUES[7] == 0
    assert NF4_VALUES[15] == 1
    weight, statistics, _ = layer(rows=5, columns=24)  # 120 weights: two blocks of 50 and a short one
    result = NF4(block_size=50).compress(weight, statistics)
    flat, ours = weight.flatten(), result.weight.flatten()
    for start in range(0, 120, 50):
        block = flat[start : start + 50]
        table = torch.tensor(NF4_VALUES) * block.abs().max()
        nearest = (block[:, None] - table).abs().amin(1)
        assert torch.allclose((block - ours[start : start + 50]).abs(), nearest, atol=1e-6)
    assert torch.equal(NF4(block_size=50).compress(result.weight, statistics).weight, result.weight)


def test_awq_chooses_the_best_exponent_of_those_it_tries():
    weight, statistics, inputs = layer(rows=30, columns=64)
    options = AWQ(bits=3, group_size=32)
    result = options.compress(weight, statistics)
    errors = []
    for step in range(20):
        scale = inputs.abs().mean(0) ** (step / 20)
        scaled = RTN(bits=3, group_size=32).compress(weight * scale, statistics).weight / scale
        errors.append(float((inputs @ (scaled - weight).T).square().sum()))
    ours = float((inputs @ (result.weight - weight).T).square().sum())
    assert ours == pytest.approx(min(errors), rel=0.05)  # the common factor of s moves rounding ties
    assert ours < errors[0]


def test_the_methods_rank_as_measured():
    """On correlated inputs second order beats scores, scores beat magnitude, and joint beats the chain."""
    weight, statistics, _ = layer(rows=96, columns=512, tokens=2000)

    def error(result):
        return naive.output_error(weight, result.weight, statistics.hessian)

    for fields in ({"sparsity": 0.5}, {"pattern": "2:4"}):
        by_rank = [error(m(**fields).compress(weight, statistics)) for m in (SparseGPT, WandaUpdate, Wanda, Magnitude)]
        assert by_rank == sorted(by_rank)
    rtn, gptq = (error(m(group_size=128).compress(weight, statistics)) for m in (RTN, GPTQ))
    off = error(GPTQ(group_size=128, activation_order="off").compress(weight, statistics))
    assert gptq < off < rtn

    joint = error(Joint(sparsity=0.5).compress(weight, statistics))
    pruned = SparseGPT(sparsity=0.5).compress(weight, statistics)
    chained = error(GPTQ().compress(pruned.weight, statistics, held=pruned.mask))
    rounded = error(RTN().compress(pruned.weight, statistics, held=pruned.mask))
    assert joint < chained < rounded


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_an_error_with_the_layers_name(method, bad):
    weight, statistics, _ = layer()
    weight[3, 5] = bad
    with pytest.raises(InputError, match=r"layer: the weight holds NaN or infinity"):
        configured(method).compress(weight, statistics)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
def test_inputs_that_are_not_finite_are_an_error_with_layer_and_record(bad):
    statistics = InputStatistics("model.layers.2.self_attn.q_proj", 8)
    rows = torch.ones(4, 8)
    rows[2, 3] = bad
    with pytest.raises(InputError, match=r"layers\.2\.self_attn\.q_proj.*channel.*3.*from agent:2"):
        statistics.add(rows, source="agent:{}".format)
    assert statistics.tokens == 0


@pytest.mark.parametrize("method", DATA)
def test_three_calibration_tokens_use_the_named_fallback(method):
    weight, statistics, _ = layer(tokens=3)
    result = configured(method).compress(weight, statistics)
    assert result.fallback in ("magnitude", "rtn", "magnitude then rtn")
    assert "3 calibration tokens, fewer than minimum_tokens=32" in result.warnings[0]
    assert "fell back to" in result.warnings[0]
    if method in PRUNING:
        assert sparsity_of(result.weight) >= 0.5
    if method in QUANTISING:
        assert result.quantised.group_size == 32


@pytest.mark.parametrize("method", [method for method in METHODS if method.needs == "hessian" and method is not AWQ])
def test_a_hessian_that_stays_indefinite_uses_the_named_fallback(method):
    weight, statistics, _ = layer()
    vector = torch.ones(256) / 16
    statistics.factors.clear()
    statistics.hessian -= 100 * statistics.hessian.diagonal().mean() * torch.outer(vector, vector)
    result = configured(method).compress(weight, statistics)
    assert result.fallback in ("wanda", "rtn", "wanda then rtn")
    assert "not positive definite at damping 1" in result.warnings[0]


def test_rank_deficient_and_dead_inputs_are_counted_and_damped():
    """Ten short records for a wide layer: fewer rows than inputs, two inputs never seen."""
    weight, statistics, _ = layer(rows=16, columns=512, tokens=100, dead=(1, 2))
    result = SparseGPT(sparsity=0.5).compress(weight, statistics)
    assert result.dead_columns == 2
    assert bool(torch.all(result.weight[:, 1:3] == 0))
    assert torch.isfinite(result.weight).all()
    assert result.damping >= 0.01
    assert len(result.warnings) == (result.damping_steps > 0)


def test_layers_that_do_not_fit_are_an_error_with_the_way_out():
    weight, statistics, _ = layer(columns=90)
    with pytest.raises(InputError, match=r"layer: pattern 2:4 does not divide its 90 inputs"):
        SparseGPT(pattern="2:4").compress(weight, statistics)
    with pytest.raises(InputError, match=r"layer: group_size 32 does not divide its 90 inputs; use null"):
        GPTQ(group_size=32).compress(weight, statistics)
    weight, statistics, _ = layer(columns=96)
    with pytest.raises(InputError, match=r"use 32 or 16 or 8, or null"):
        Joint(group_size=64).compress(weight, statistics)


def test_statistics_add_up_whatever_the_batches():
    _, whole, inputs = layer(tokens=100)
    parts = InputStatistics("layer", 256)
    for rows in inputs.split(33):
        parts.add(rows)
    assert parts.tokens == whole.tokens
    assert torch.allclose(parts.square_sum, whole.square_sum, rtol=1e-12)
    assert torch.allclose(parts.hessian, whole.hessian, rtol=1e-4, atol=1e-3)
    assert torch.allclose(whole.norms(), inputs.norm(dim=0), rtol=1e-5)
    assert torch.allclose(whole.mean_absolute(), inputs.abs().mean(0), rtol=1e-5)
    weight = torch.ones(2, 256)
    assert whole.output_energy(weight) == pytest.approx(float((inputs @ weight.T).square().sum()), rel=1e-4)
