"""Walking block by block is the model's own forward, bit for bit, whatever the family hands from layer to layer."""

import pytest
import torch

from moeprune.artifacts.errors import InputError
from moeprune.dense.weights import decoder_blocks, look
from moeprune.models.streaming.turns import Turns
from tests.tiny import DENSE, NO_TEXT_ALONE, TINY, build, inputs

ENCODER_DECODER = {"switch_transformers", "nllb_moe"}
# cross-layer state, one mask a layer type, hybrid mixers, multimodal wrappers, hyper-connections
SOME = ["qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "qwen3_next", "zaya", "deepseek_v4", "gemma4_text"]
OTHERS = sorted({*TINY, *DENSE} - ENCODER_DECODER - set(SOME) - set(NO_TEXT_ALONE))


def batches():
    ids = [inputs("qwen3_moe", batch=b, length=16 + 8 * b, seed=b)["input_ids"] for b in (1, 2)]
    masks = [torch.ones_like(i) for i in ids]
    masks[1][1, -5:] = 0
    return list(zip(ids, masks, strict=True))


def walked(model, *, times=2):
    """Hidden states of every batch at the end of a walk that watches each block `times` times."""
    results = {}

    def run(number, ids, mask):
        results[number] = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)[0]

    runs = [lambda n=n, i=i, m=m: run(n, i, m) for n, (i, m) in enumerate(batches())]
    blocks = [block for _, block in decoder_blocks(model)]
    with Turns(blocks, runs) as turns:
        for block in range(len(blocks)):
            for _ in range(times):
                assert list(turns.watch(block)) == [0, 1]
            turns.go_on(block)
    return [results[number] for number in sorted(results)]


def plain(model):
    with torch.no_grad():
        return [model.base_model(input_ids=i, attention_mask=m, use_cache=False)[0] for i, m in batches()]


@pytest.mark.parametrize("name", [*SOME, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_a_walk_is_the_plain_forward_bit_for_bit(name):
    model = build(name)
    for ours, theirs in zip(walked(model), plain(model), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", [*SOME, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_every_matrix_of_a_model_is_accounted_for_once(name):
    model = build(name)
    seen = look(model)
    ours = sum(w.shape[0] * w.shape[1] for w in seen.weights) + sum(item.parameters for item in seen.left)
    linears = sum(p.numel() for p in model.parameters() if p.ndim >= 2)
    assert ours == linears
    names = [w.name for w in seen.weights] + [item.name for item in seen.left]
    assert len(names) == len(set(names))
    assert not any("router" in w.name.split(".") or ".gate.weight" in w.name for w in seen.weights)


def test_weights_read_and_write_what_is_stored():
    """Linear, fused and transposed fused experts; writing what was read changes nothing, and other values arrive."""
    for name in ("qwen3_moe", "gpt_oss"):
        model = build(name)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        weights = look(model).weights
        for weight in weights:
            weight.write(weight.read())
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        expert = next(w for w in weights if w.expert == 3 and w.part == "down_proj")
        values = torch.arange(expert.shape[0] * expert.shape[1]).view(expert.shape).float()
        expert.write(values)
        stored = model.get_submodule(expert.name.split(".experts.")[0] + ".experts").down_proj[3]
        assert torch.equal(stored.T if name == "gpt_oss" else stored, values)


def test_an_error_in_one_batch_reaches_the_caller_and_leaves_the_model_as_it_was():
    model = build("qwen3_moe")
    blocks = [block for _, block in decoder_blocks(model)]
    want = plain(model)
    ids, mask = batches()[0]

    def broken():
        model.base_model(input_ids=ids, attention_mask=mask)
        raise ValueError("a record is bad")

    with pytest.raises(ValueError, match="a record is bad"), Turns(blocks, [broken]) as turns:
        [turns.go_on(block) for block in (0, 1)]
    with pytest.raises(KeyboardInterrupt), Turns(blocks, [broken]):
        raise KeyboardInterrupt
    assert not any("forward" in vars(block) for block in blocks)
    for ours, theirs in zip(plain(model), want, strict=True):
        assert torch.equal(ours, theirs)


def test_a_model_that_skips_blocks_is_refused():
    model = build("qwen3_moe")
    blocks = [block for _, block in decoder_blocks(model)]
    ids, mask = batches()[0]
    run = [lambda: model.base_model(input_ids=ids, attention_mask=mask)]
    with pytest.raises(InputError, match="out of order"), Turns(blocks[::-1], run) as turns:
        turns.go_on(0)
    with (
        pytest.raises(InputError, match="ended after block 0 of 2"),
        Turns([blocks[0], torch.nn.Linear(1, 1)], run) as t,
    ):
        t.go_on(0)


@pytest.mark.parametrize("name", sorted(ENCODER_DECODER))
def test_encoder_decoders_are_refused(name):
    with pytest.raises(InputError, match="no stack of decoder blocks"):
        look(build(name))
