"""Edits move whole rows and whole tensors, nothing else."""

import json
import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.safetensors_files import Entry
from moeprune.checkpoint.atomic_directory import AtomicDirectory
from moeprune.checkpoint.edits import Drop, NewTensor, Renumber, Replace, Slice, expert_edits, joined, outputs
from moeprune.checkpoint.inventory import Tensor, inventory
from moeprune.checkpoint.rewrite import plan_work, write_work
from tests.checkpoint.sources import CORE, contents, save_single, tensors_of
from tests.tiny import inputs, save_tiny


def rewrite(source, edits, target, **config_edits):
    work = plan_work(inventory(source), edits, config_edits={(key,): value for key, value in config_edits.items()})
    place = AtomicDirectory(target, source=source, overwrite=False)
    write_work(work, place, finish=lambda directory, entries: {})


def logits(directory, name):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(**inputs(name)).logits


def shuffled(layer, generator):
    """A random order of the experts in which groups stay together: the router scores groups as a whole."""
    size = layer.num_experts // layer.num_groups
    groups = [generator.sample(range(g * size, (g + 1) * size), size) for g in range(layer.num_groups)]
    return [expert for group in groups for expert in group]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", CORE)
def test_permuting_experts_changes_nothing(name, fused, tmp_path):
    source = save_tiny(name, tmp_path / "source")
    if fused:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        save_single(source, {n: t.contiguous() for n, t in model.state_dict().items()})
    checkpoint = inventory(source)
    generator = random.Random(7)
    orders = {layer.name: shuffled(layer, generator) for layer in checkpoint.layers}
    rewrite(source, expert_edits(checkpoint, orders), tmp_path / "out")
    assert contents(tmp_path / "out") != contents(source)
    torch.testing.assert_close(logits(tmp_path / "out", name), logits(source, name), atol=1e-5, rtol=1e-5)


def test_swapping_experts_across_groups_changes_the_logits(tmp_path):
    """The check above can fail: groups are real."""
    source = save_tiny("deepseek_v3", tmp_path / "source")
    order = {"model.layers.1.mlp": [4, 1, 2, 3, 0, 5, 6, 7]}
    rewrite(source, expert_edits(inventory(source), order), tmp_path / "out")
    assert not torch.allclose(logits(tmp_path / "out", "deepseek_v3"), logits(source, "deepseek_v3"), atol=1e-3)


def test_layers_that_are_not_named_stay(tmp_path):
    source = save_tiny("qwen3_moe", tmp_path / "source")
    checkpoint = inventory(source)
    edits = expert_edits(checkpoint, {"model.layers.0.mlp": range(4)})
    assert {checkpoint.by_name[name].layer for name in edits} == {"model.layers.0.mlp"}


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_slice_is_numpys_take(axis):
    array = np.arange(4 * 5 * 6, dtype="<i2").reshape(4, 5, 6)
    entry = Entry("x", "I16", array.shape, 0, array.nbytes)
    rows = (3, 0, 1, 1)
    (output,) = outputs(Tensor(entry, "file", None), Slice(rows, axis))
    data = b"".join(array.tobytes()[start:stop] for start, stop in output.spans)
    expected = array.take(rows, axis)
    assert (output.shape, output.size, data) == (expected.shape, expected.nbytes, expected.tobytes())


def test_neighbouring_rows_are_read_at_once():
    entry = Entry("x", "BF16", (8, 10), 1000, 1160)
    (output,) = outputs(Tensor(entry, "file", None), Slice((0, 1, 2, 5, 6)))
    assert output.spans == ((1000, 1060), (1100, 1140))
    assert joined([(0, 4), (4, 4), (4, 9), (20, 21)]) == ((0, 9), (20, 21))


def test_rows_that_share_a_byte_are_refused():
    entry = Entry("experts.gate_blocks", "F4", (8, 1), 0, 4)
    with pytest.raises(InputError, match=r"experts\.gate_blocks"):
        list(outputs(Tensor(entry, "file", None), Slice((0, 1))))


def test_drop_renumber_and_replace(tmp_path):
    source = save_tiny("qwen3_moe", tmp_path / "source", shard_size="40KB")
    norm, head, router = "model.norm.weight", "lm_head.weight", "model.layers.0.mlp.gate.weight"
    scale = NewTensor("lm_head.weight_scale", "F32", (2,), 8, lambda: np.array([1, 2], "<f4").tobytes())
    packed = NewTensor("lm_head.weight_packed", "U8", (3,), 3, lambda: b"abc")
    before = contents(source)
    rewrite(source, {norm: Drop(), head: Replace((scale, packed)), router: Renumber("other")}, tmp_path / "out")
    after = contents(tmp_path / "out")
    assert after["lm_head.weight_scale"] == ("F32", (2,), np.array([1, 2], "<f4").tobytes())
    assert after["lm_head.weight_packed"] == ("U8", (3,), b"abc")
    assert after["other"] == before[router]
    assert after.keys() == before.keys() - {norm, head, router} | {scale.name, packed.name, "other"}


def test_what_is_written_stays_aligned(tmp_path):
    """A byte-sized tensor before wider ones must not shift them: readers map the file in place."""
    source = save_tiny("qwen3_moe", tmp_path / "source", dtype="bfloat16")
    odd = NewTensor("lm_head.odd", "U8", (3,), 3, lambda: b"abc")
    rewrite(source, {"lm_head.weight": Replace((odd,))}, tmp_path / "out")
    assert torch.equal(tensors_of(tmp_path / "out")["lm_head.odd"], torch.tensor([97, 98, 99], dtype=torch.uint8))
    header = json.loads((tmp_path / "out" / "model.safetensors").read_bytes()[8:].split(b"}}")[0] + b"}}")
    assert all(v["data_offsets"][0] % 2 == 0 for k, v in header.items() if k != "__metadata__" and v["dtype"] == "BF16")
