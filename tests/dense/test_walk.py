"""The walk against the obvious slow way, its honesty with hard input, and resuming."""

import copy

import pytest
import torch
from torch import nn

from moeprune.artifacts.errors import InputError
from moeprune.dense.methods.inputs import InputStatistics
from moeprune.dense.methods.kinds import Pattern
from moeprune.dense.methods.pruning import Magnitude, SparseGPT, Wanda
from moeprune.dense.methods.quantising import FP8, GPTQ, RTN, Joint
from moeprune.dense.methods.result import follows
from moeprune.dense.walk import compress_model
from moeprune.dense.weights import look
from tests.dense.tokens import token_set
from tests.tiny import TINY, build

ALL = ("attention", "dense_mlp", "shared_expert", "routed_expert")
FEW = {"minimum_tokens": 1}


def linears(model, *roles):
    return [w for w in look(model).weights if w.role in roles]


def expert_inputs(module, hidden, index, expert):
    """Rows that reach one expert and what reaches its down projection, from the eager definition of the family."""
    rows = hidden[(index == expert).any(1)]
    up = module.gate_up_proj[expert]
    out = rows @ (up if module.is_transposed else up.T)
    if module.has_bias:
        out = out + module.gate_up_proj_bias[expert]
    return rows, module._apply_gate(out)


def slowly(model, method, tokens):
    """Block by block; before each, one sequence after the other through the WHOLE model as it is by then."""
    model = copy.deepcopy(model)
    seen = look(model)
    for block in range(len(seen.blocks)):
        statistics = {}
        handles = []
        weights = [w for w in seen.weights if w.block == block]

        def add(weight, rows, statistics=statistics):
            if weight.name not in statistics:
                statistics[weight.name] = InputStatistics(weight.name, weight.shape[1])
            statistics[weight.name].add(rows)

        for weight in weights:
            if weight.expert is None:
                handles.append(
                    weight.module.register_forward_pre_hook(
                        lambda _, args, weight=weight, add=add: add(weight, args[0].flatten(0, -2))
                    )
                )
        for module in {id(w.module): w.module for w in weights if w.expert is not None}.values():

            def routed(module, args, weights=tuple(w for w in weights if w.module is module), add=add):
                for weight in weights:
                    rows, middle = expert_inputs(module, args[0], args[1], weight.expert)
                    add(weight, middle if weight.part == "down_proj" else rows)

            handles.append(module.register_forward_pre_hook(routed))
        with torch.no_grad():
            for sequence in tokens.sequences:
                model(torch.from_numpy(sequence.ids).long()[None])
        for handle in handles:
            handle.remove()
        for weight in weights:
            empty = InputStatistics(weight.name, weight.shape[1])
            weight.write(method.compress(weight.read(), statistics.get(weight.name, empty)).weight)
    return model


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next"])
@pytest.mark.parametrize("batch_tokens", [1, 4096])
def test_the_walk_equals_the_slow_way(name, batch_tokens):
    model, tokens = build(name), token_set()
    method = Wanda(sparsity=0.5, targets=ALL) if name == "gpt_oss" else SparseGPT(sparsity=0.5, targets=ALL)
    method = method.model_copy(update=FEW)
    expected = slowly(model, method, tokens)
    methods = [type(method)(sparsity=0.5, targets=tuple({w.role for w in look(model).weights}), **FEW)]
    compress_model(model, methods, tokens, batch_tokens=batch_tokens)
    for ours, theirs in zip(look(model).weights, look(expected).weights, strict=True):
        same = (ours.read() != 0) == (theirs.read() != 0)
        assert float(same.double().mean()) > 0.99, ours.name  # near ties fall either way in float32
        agree = torch.isclose(ours.read(), theirs.read(), atol=5e-3, rtol=1e-2) | ~same
        assert float(agree.double().mean()) > 0.97, ours.name


@pytest.mark.parametrize("name", [*sorted(set(TINY) - {"switch_transformers", "nllb_moe"})])
def test_routed_experts_of_every_family_are_seen_right_or_not_at_all(name):
    """The walk checks the expert-by-expert view against the family's own forward; special layouts are refused."""
    model = build(name)
    routed = [w for w in linears(model, "routed_expert") if w.expert is not None]
    if not routed:
        with pytest.raises(InputError, match="'routed_expert' matches nothing"):
            compress_model(model, [Wanda(targets=("routed_expert",))], token_set())
        return
    before = [w.read() for w in routed]
    report = compress_model(model, [Wanda(targets=("routed_expert",), pattern="2:4", **FEW)], token_set()).report
    assert len(report.steps) == len(routed)
    assert sum(step.tokens for step in report.steps) > 0
    for weight, old in zip(routed, before, strict=True):
        assert follows(weight.read(), Pattern(2, 4))
        assert not torch.equal(weight.read(), old)


def test_padding_and_uncounted_tokens_never_enter():
    """The number of tokens is exact whatever the batches, and the sums are those of the counted rows alone."""
    methods = [SparseGPT(targets=("attention", "routed_expert"), **FEW)]
    reports = []
    for batch_tokens in (1, 200, 4096):
        model = build("qwen3_moe")
        reports.append(compress_model(model, methods, token_set(uncounted=3), batch_tokens=batch_tokens).report)
    counted = sum(length - 3 for length in (9, 17, 24, 24, 30, 40))
    for report in reports:
        tokens = {step.weight: step.tokens for step in report.steps}
        assert tokens["model.layers.1.self_attn.q_proj"] == counted
        for layer in (0, 1):
            routed = [count for name, count in tokens.items() if f"{layer}.mlp.experts" in name and "down" in name]
            assert sum(routed) == counted * 2  # top-2
        for ours, theirs in zip(report.steps, reports[0].steps, strict=True):
            assert ours.error == pytest.approx(theirs.error, rel=0.2, abs=1e-3)


def test_methods_follow_one_another_with_the_mask_held():
    model = build("qwen3_moe")
    chain = [
        SparseGPT(pattern="2:4", targets=("attention", "routed_expert"), **FEW),
        GPTQ(group_size=8, symmetric=False, targets=("routed_expert",), **FEW),
        FP8(targets=("attention",)),
    ]
    result = compress_model(model, chain, token_set(), dtype=torch.bfloat16)
    for weight in linears(model, "attention", "routed_expert"):
        values = weight.read()
        assert follows(values, Pattern(2, 4))
        assert torch.equal(values, values.bfloat16().float())
        quantised = result.quantised[weight.name]
        assert quantised.scheme == ("fp8" if weight.role == "attention" else "int")
        assert torch.equal(quantised.scale, quantised.scale.bfloat16().float())
        steps = [step for step in result.report.steps if step.weight == weight.name]
        assert [step.method for step in steps] == ["sparsegpt", "fp8" if weight.role == "attention" else "gptq"]
        assert steps[0].error < steps[1].error
        assert all(step.sparsity >= 0.5 for step in steps)
    metrics = result.report.metrics()
    assert metrics["dense/attention/weights"] == 8
    assert metrics["dense/attention/bits"] == pytest.approx(8 + 16 / 32, abs=0.5)
    assert metrics["dense/routed_expert/sparsity"] >= 0.5


def test_a_sparse_source_keeps_its_zeros_through_quantisation():
    """Two calls, as with two checkpoints: pruned first, quantised by somebody who does not know."""
    model = build("qwen3_moe")
    compress_model(model, [Magnitude(pattern="2:4")], None)
    zeros = {w.name: w.read() == 0 for w in linears(model, "attention")}
    report = compress_model(model, [GPTQ(group_size=16, symmetric=False, **FEW)], token_set()).report
    for weight in linears(model, "attention"):
        assert bool((weight.read()[zeros[weight.name]] == 0).all())
    assert any("came with 50.0% exact zeros; they are held" in warning for warning in report.warnings)


def test_a_killed_walk_resumes_and_ends_the_same(tmp_path):
    methods = [SparseGPT(targets=("attention", "routed_expert"), **FEW), RTN(group_size=8, targets=("attention",))]
    whole = build("qwen3_moe", num_hidden_layers=3)
    expected = compress_model(whole, methods, token_set())

    def die(done, total):
        if done == 2:
            raise KeyboardInterrupt

    killed = build("qwen3_moe", num_hidden_layers=3)
    with pytest.raises(KeyboardInterrupt):
        compress_model(killed, methods, token_set(), state=tmp_path / "state", on_progress=die)
    names = [name for i in (0, 1) for name in (f"block-000{i}-000.safetensors", f"block-000{i}.json")]
    assert sorted(p.name for p in (tmp_path / "state").glob("block*")) == names
    kept = [path.stat().st_mtime_ns for path in sorted((tmp_path / "state").glob("block*"))]
    (tmp_path / "state" / ".block-0002-000.safetensors.1.tmp").write_bytes(b"torn")

    resumed = build("qwen3_moe", num_hidden_layers=3)
    result = compress_model(resumed, methods, token_set(), state=tmp_path / "state")
    for (name, ours), theirs in zip(resumed.state_dict().items(), whole.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    assert result.report == expected.report
    assert result.quantised.keys() == expected.quantised.keys()
    assert all(
        torch.equal(result.quantised[name].scale, quantised.scale) for name, quantised in expected.quantised.items()
    )
    assert [path.stat().st_mtime_ns for path in sorted((tmp_path / "state").glob("block*"))[:4]] == kept

    other = build("qwen3_moe", seed=1, num_hidden_layers=3)  # another model must not pick those blocks up
    fresh = copy.deepcopy(other)
    compress_model(other, methods, token_set(), state=tmp_path / "state")
    compress_model(fresh, methods, token_set())
    assert all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), fresh.state_dict().values(), strict=True))


def test_little_memory_means_more_rounds_and_the_same_result():
    models = [build("mixtral"), build("mixtral")]
    methods = [SparseGPT(targets=("routed_expert", "attention"), **FEW)]
    compress_model(models[0], methods, token_set())
    compress_model(models[1], methods, token_set(), statistics_bytes=3 * 4 * 48**2)
    assert all(torch.equal(a, b) for a, b in zip(*(m.state_dict().values() for m in models), strict=True))


def test_an_expert_that_sees_too_few_tokens_uses_the_named_fallback_and_is_counted():
    model = build("deepseek_v3")
    bias = next(p for n, p in [*model.named_parameters(), *model.named_buffers()] if "e_score_correction_bias" in n)
    bias.data[5] = -1e4
    report = compress_model(model, [SparseGPT(targets=("routed_expert",), **FEW)], token_set()).report
    steps = {step.weight: step for step in report.steps if ".experts.5." in step.weight}
    assert len(steps) == 2
    for step in steps.values():
        assert step.tokens == 0
        assert step.fallback == "magnitude"
        assert step.sparsity == 0.5
        assert step.error is None
    assert report.metrics()["dense/routed_expert/fallbacks"] == 2
    assert any("experts.5" in w and "0 calibration tokens" in w and "magnitude" in w for w in report.warnings)
    assert any(row.methods == "sparsegpt (fallback: magnitude)" and row.weights == 2 for row in report.coverage)


def test_inputs_that_are_not_finite_are_an_error_that_names_layer_and_record():
    model = build("qwen3_moe")
    tokens = token_set(lengths=(9, 17, 24))
    bad = tokens.sequences[1]
    poisoned = int(bad.ids[4])
    assert sum(poisoned in sequence.ids for sequence in tokens.sequences) == 1
    model.model.embed_tokens.weight.data[poisoned] = torch.inf
    with pytest.raises(InputError, match=rf"layers\.0\.self_attn\.q_proj: NaN.*test, trajectory {bad.trajectory[:12]}"):
        compress_model(model, [Wanda(targets=("attention",), **FEW)], tokens)
    assert not any("forward" in vars(module) for module in model.modules())


def test_tied_weights_are_compressed_once_or_left_alone():
    model = build("qwen3")
    layers = model.model.layers
    layers[0].self_attn.v_proj.weight = layers[0].self_attn.k_proj.weight  # inside a block
    layers[1].mlp.up_proj.weight = layers[0].mlp.up_proj.weight  # across blocks
    before = layers[0].mlp.up_proj.weight.clone()
    report = compress_model(model, [SparseGPT(**FEW)], token_set()).report
    names = [step.weight for step in report.steps]
    assert "model.layers.0.self_attn.k_proj" in names
    assert "model.layers.0.self_attn.v_proj" not in names
    assert torch.equal(layers[0].mlp.up_proj.weight, before)
    tied = [row for row in report.coverage if row.methods == "unchanged: tied across blocks"]
    assert tied[0].weights == 2
    assert next(step.tokens for step in report.steps if step.weight.endswith("0.self_attn.k_proj")) == 144


def test_router_and_head_are_out_of_reach():
    model = build("deepseek_v3")
    kept = {
        name: p.clone() for name, p in model.named_parameters() if ".gate." in name or "embed" in name or "head" in name
    }
    compress_model(model, [RTN(group_size=None, targets=ALL)], None)
    for name, before in kept.items():
        assert torch.equal(model.get_parameter(name), before), name
    with pytest.raises(InputError, match=r"'re:lm_head' matches nothing; lm_head.* is never compressed: outside"):
        compress_model(model, [RTN(targets=("re:lm_head",))], None)
    with pytest.raises(
        InputError, match=r"gate\\\.' matches nothing; model\.layers\.1\.mlp\.gate.* is never compressed: router"
    ):
        compress_model(model, [RTN(targets=(r"re:mlp\.gate\.",))], None)


def test_patterns_choose_modules_by_name():
    model = build("qwen3_moe")
    report = compress_model(model, [RTN(group_size=None, targets=(r"re:layers\.1\..*[qk]_proj$",))], None).report
    assert [s.weight for s in report.steps] == [f"model.layers.1.self_attn.{p}_proj" for p in "qk"]


@pytest.mark.parametrize(
    ("methods", "tokens", "message"),
    [
        (
            [RTN(targets=("shared_expert",))],
            None,
            r"dense\[0\] rtn: target 'shared_expert' matches nothing; this model has",
        ),
        (
            [RTN(targets=("attention", "re:nope"))],
            None,
            r"target 're:nope' matches nothing; names look like model\.layers",
        ),
        ([RTN(group_size=8), Magnitude()], None, r"runs magnitude after rtn.*prune first .*force: true"),
        ([Joint(group_size=8), GPTQ(group_size=8)], token_set(), "runs gptq after joint"),
        ([FP8(), RTN(group_size=8, targets=("re:q_proj",))], None, "q_proj: dense runs rtn after fp8"),
        ([SparseGPT()], None, "sparsegpt needs calibration tokens and there are none"),
        ([SparseGPT()], token_set(uncounted=99), "sparsegpt needs calibration tokens and there are none"),
        ([RTN(group_size=64)], None, r"q_proj: group_size 64 does not divide its 32 inputs; use 32 or 16 or 8"),
        ([Magnitude(pattern="5:10")], None, r"pattern 5:10 does not divide its 32 inputs"),
    ],
)
def test_bad_requests_are_refused_before_anything_changes(methods, tokens, message):
    model = build("qwen3_moe")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InputError, match=message):
        compress_model(model, methods, tokens)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_reverse_order_can_be_forced_and_is_told():
    model = build("qwen3_moe")
    methods = [RTN(group_size=8), SparseGPT(force=True, **FEW)]
    result = compress_model(model, methods, token_set())
    assert any("changed quantised weights" in warning for warning in result.report.warnings)
    assert not result.quantised
    stayed = compress_model(build("qwen3_moe"), [RTN(group_size=8), Wanda(force=True, **FEW)], token_set())
    assert len(stayed.quantised) == 8


def test_quantised_models_are_refused():
    model = build("qwen3_moe")
    layer = model.model.layers[0].self_attn
    layer.q_proj.weight = nn.Parameter(layer.q_proj.weight.data.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(InputError, match=r"q_proj: stored as torch\.float8_e4m3fn, quantised already"):
        compress_model(model, [RTN(group_size=8)], None)
