"""The recorder on a tiny model: against a naive loop, whatever the batch, the implementation, the kill."""

import numpy as np
import pytest
import torch

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.statistics import SUMS, RoutingStatistics
from moeprune.models.layers import find_moe_layers
from moeprune.recording.accumulate import LayerSums
from moeprune.recording.checks import RecordingError, check_conservation
from moeprune.recording.recorder import record
from tests.tiny import build
from tests.tokens import random_pieces, token_set

PIECES = random_pieces([40, 17, 33, 25, 64, 9, 12, 80])


@pytest.fixture(scope="module")
def model():
    return build("qwen3_moe")


def test_every_statistic_equals_a_naive_loop(model):
    statistics = record(model, token_set(PIECES), statistics="all")
    for layer in find_moe_layers(model):
        naive = _naive(model, layer, PIECES)
        ours = statistics.domains["all"][layer.name]
        for name, value in naive.items():
            np.testing.assert_allclose(getattr(ours, name), value, rtol=2e-5, atol=1e-5, err_msg=f"{layer.name} {name}")


def _naive(model, layer, pieces):
    """Token by token, expert by expert, straight from the definitions."""
    experts, hidden = layer.info.num_experts, model.config.hidden_size
    out = {name: np.zeros(experts) for name in ("gate_sum", "norm_sum", "norm_square_sum", "gated_norm_sum")}
    out |= {name: np.zeros((experts, experts)) for name in ("co_count", "norm_product", "output_product")}
    out["output_max"], out["output_sum"] = np.full(experts, -np.inf), np.zeros((experts, hidden))
    seen = []
    handle = layer.experts.register_forward_pre_hook(lambda module, args: seen.append(args))
    with torch.no_grad():
        for piece in pieces:
            model(input_ids=torch.tensor([piece]))
    handle.remove()
    for states, index, gates in seen:
        for state, ids, weights in zip(states, index, gates):
            with torch.no_grad():
                one = torch.ones(1, 1)
                f = {int(e): layer.experts(state[None], e.view(1, 1), one)[0].double().numpy() for e in ids}
            g = {int(e): float(w) for e, w in zip(ids, weights)}
            for i in f:
                norm = np.linalg.norm(f[i])
                out["gate_sum"][i] += g[i]
                out["norm_sum"][i] += norm
                out["norm_square_sum"][i] += norm**2
                out["gated_norm_sum"][i] += g[i] * norm
                out["output_max"][i] = max(out["output_max"][i], f[i].max())
                out["output_sum"][i] += f[i]
                for j in f:
                    out["co_count"][i, j] += 1
                    out["norm_product"][i, j] += g[i] * norm * g[j] * np.linalg.norm(f[j])
                    out["output_product"][i, j] += g[i] * g[j] * float(f[i] @ f[j])
    return out


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
def test_every_implementation_of_the_experts_is_seen(model, implementation):
    expected = record(model, token_set(PIECES)).domains["all"]
    other = build("qwen3_moe")
    other.set_experts_implementation(implementation)
    for name, sums in record(other, token_set(PIECES)).domains["all"].items():
        np.testing.assert_array_equal(sums.co_count, expected[name].co_count)
        np.testing.assert_allclose(sums.norm_product, expected[name].norm_product, rtol=1e-5)


def test_order_and_batch_size_change_no_bit_of_a_token(model):
    whole = record(model, token_set(PIECES), batch_tokens=8192).domains["all"]
    shuffled = record(model, token_set(PIECES[::-1]), batch_tokens=50).domains["all"]
    for name, sums in whole.items():
        np.testing.assert_array_equal(sums.co_count, shuffled[name].co_count)
        # float64 sums of the same numbers in another order
        np.testing.assert_allclose(sums.norm_product, shuffled[name].norm_product, rtol=1e-13)


def test_only_counted_tokens_enter(model):
    counted = [np.arange(len(piece)) % 3 == 0 for piece in PIECES]
    sums = record(model, token_set(PIECES, counted=counted)).domains["all"]
    expected = sum(int(mask.sum()) for mask in counted)
    for layer in find_moe_layers(model):
        assert int(sums[layer.name].tokens) == expected
        assert sums[layer.name].count.sum() == expected * layer.info.top_k


def test_the_halves_add_to_the_whole(model):
    statistics = record(model, token_set(PIECES))
    layer = statistics.layers[0].name
    even, odd = (statistics.mix(part=part)[layer] for part in ("even", "odd"))
    assert int(even.tokens) > 0
    assert int(odd.tokens) > 0
    np.testing.assert_array_equal(even.co_count + odd.co_count, statistics.domains["all"][layer].co_count)


def test_an_expert_that_no_token_reaches_has_zeros_and_no_nan(model):
    dead = build("qwen3_moe")
    layer = find_moe_layers(dead)[0]
    handle = layer.router.register_forward_hook(lambda module, args, out: _without(out, 5))
    sums = record(dead, token_set(PIECES)).domains["all"][layer.name]
    handle.remove()
    assert sums.count[5] == 0
    assert sums.output_max[5] == -np.inf
    for name in SUMS:
        value = getattr(sums, name)
        assert value is None or np.isfinite(value).all()


def _without(output, expert):
    """The router's choice with another expert in the place of this one, and never the same expert twice."""
    logits, weights, index = output
    other = index.flip(1)  # top-2: the other slot
    free = torch.where((other + 1) % 8 == expert, (other + 2) % 8, (other + 1) % 8)
    return logits, weights, torch.where(index == expert, free, index)


def test_statistics_survive_a_cast_of_the_model():
    tiny = build("qwen3_moe").to(torch.bfloat16)
    sums = record(tiny, token_set(PIECES)).domains["all"]
    first = next(iter(sums.values()))
    assert first.co_count.dtype == np.int64
    assert first.norm_product.dtype == np.float64


def test_a_killed_recording_ends_bit_for_bit_like_an_uninterrupted_one(model, tmp_path):
    expected = record(model, token_set(PIECES), batch_tokens=50)
    calls = 0

    def killed(done, total):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt

    arguments = {"batch_tokens": 50, "partial": tmp_path / "x.partial", "commit_seconds": 0.0}
    with pytest.raises(KeyboardInterrupt):
        record(model, token_set(PIECES), on_progress=killed, **arguments)
    seen = []
    resumed = record(model, token_set(PIECES), on_progress=lambda done, total: seen.append(done), **arguments)
    assert seen[0] > min(map(len, PIECES)) * 3, "it began again instead of going on"
    _assert_equal(resumed, expected)


def test_a_part_of_other_batches_is_not_used(model, tmp_path):
    arguments = {"partial": tmp_path / "x.partial", "commit_seconds": 0.0}
    record(model, token_set(PIECES[:4]), **arguments)
    _assert_equal(record(model, token_set(PIECES), **arguments), record(model, token_set(PIECES)))


def test_a_broken_part_is_not_used(model, tmp_path):
    (tmp_path / "x.partial").mkdir()
    (tmp_path / "x.partial" / "part.safetensors").write_bytes(b"\x08\x00\x00")
    _assert_equal(record(model, token_set(PIECES), partial=tmp_path / "x.partial"), record(model, token_set(PIECES)))


def _assert_equal(a, b):
    for name, sums in a.domains["all"].items():
        for statistic in SUMS:
            np.testing.assert_array_equal(getattr(sums, statistic), getattr(b.domains["all"][name], statistic))


def test_the_file_holds_what_was_recorded(model, tmp_path):
    statistics = record(model, token_set(PIECES), statistics="all", manifest={"key": "abc"})
    statistics.save(tmp_path / "s.safetensors")
    loaded = RoutingStatistics.load(tmp_path / "s.safetensors")
    assert loaded.key == "abc"
    assert loaded.layers == statistics.layers
    assert loaded.manifest["half_trajectories"] == "sha256 of the token ids is even"
    _assert_equal(loaded, statistics)
    layer = statistics.layers[0].name
    np.testing.assert_array_equal(loaded.half["all"][layer].co_count, statistics.half["all"][layer].co_count)
    assert loaded.domains["all"][layer].tokens.shape == ()


def test_experts_that_are_bypassed_are_an_error(model):
    bypassed = build("qwen3_moe")
    layer = find_moe_layers(bypassed)[1]
    layer.block.forward = lambda hidden: hidden * 0
    with pytest.raises(RecordingError, match=r"layers\.1\.mlp.*never called its experts"):
        record(bypassed, token_set(PIECES))


def test_a_gate_that_is_not_the_factor_is_an_error():
    scaled = build("qwen3_moe")
    layer = find_moe_layers(scaled)[0]
    own = type(layer.block).forward
    layer.block.forward = lambda hidden: own(layer.block, hidden) * 2  # a factor applied outside the experts
    with pytest.raises(RecordingError, match=r"layers\.0\.mlp.*differs from the block's output"):
        record(scaled, token_set(PIECES))


def test_a_lost_slot_is_an_error(model):
    layer = find_moe_layers(model)[0]
    sums = LayerSums(layer.info, device=torch.device("cpu"), hidden=32)
    sums.add(torch.tensor([[1, 2], [3, 4]]), torch.rand(2, 2), torch.rand(2, 2, 32), None)
    check_conservation([layer], [sums], 2)
    sums.co_count[9] -= 1  # expert 1
    with pytest.raises(RecordingError, match=r"layers\.0\.mlp: recorded 3 routed slots of 2 tokens, expected 4 of 2"):
        check_conservation([layer], [sums], 2)


def test_outputs_that_are_not_finite_are_an_error():
    broken = build("qwen3_moe")
    with torch.no_grad():
        find_moe_layers(broken)[1].experts.down_proj[3].fill_(float("nan"))
    with pytest.raises(RecordingError, match=r"model\.layers\.1\.mlp"):
        record(broken, token_set(PIECES))


def test_a_set_without_counted_tokens_is_bad_input(model):
    nothing = [np.zeros(len(piece), dtype=bool) for piece in PIECES]
    with pytest.raises(InputError, match="no counted token"):
        record(model, token_set(PIECES, counted=nothing))
