"""Every family of the table that is not refused: its checkpoint is cut right and nothing else in it changes.

`pytest tests/checkpoint -k NAME` runs one; a family is tested by being a row of the table.
"""

import json
import random

import pytest
import torch

from moeprune.artifacts.errors import InputError
from moeprune.checkpoint.atomic_directory import AtomicDirectory
from moeprune.checkpoint.config_json import COUNT_KEYS
from moeprune.checkpoint.edits import expert_edits
from moeprune.checkpoint.inventory import inventory
from moeprune.checkpoint.prune import prune_checkpoint
from moeprune.checkpoint.rewrite import plan_work, write_work
from moeprune.models.families import FAMILIES
from moeprune.models.layers import find_moe_layers, model_fingerprint
from moeprune.models.loading import auto_class, load_config
from moeprune.models.pruned import pruned
from tests.checkpoint.sources import contents, plan_for, save_single, tensors_of
from tests.tiny import TINY, WRAPPERS, inputs, save_tiny

ROWS = [*(name for name, row in FAMILIES.items() if not row.refused), *WRAPPERS]
OF_OTHER_MEDIA = ("vision_model.", "multi_modal_projector.")  # llama4 loads as a text model
KEPT = (1, 2, 3, 4, 5, 7)  # three in each half: fits routers with two groups


@pytest.fixture(scope="module", params=ROWS)
def family(request, tmp_path_factory):
    """(name, checkpoint directory, loaded model)."""
    directory = save_tiny(request.param, tmp_path_factory.mktemp(request.param) / "source", shard_size="60KB")
    return request.param, directory, load(directory)


def load(directory):
    model, info = auto_class(load_config(directory)).from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    unexpected = [name for name in info.pop("unexpected_keys") if not name.startswith(OF_OTHER_MEDIA)]
    assert not unexpected
    assert not any(info.values()), info
    return model.eval()


def logits(model, name):
    with torch.no_grad():
        return model(**inputs(name)).logits


def test_every_row_has_a_tiny_model():
    assert set(ROWS) <= set(TINY)


def test_reloading_gives_the_model_pruned_in_memory(family, tmp_path):
    name, source, base = family
    plan = plan_for(source, KEPT)
    report = prune_checkpoint(source, plan, tmp_path / "out")
    before = logits(base, name)
    with pruned(base, plan):
        expected = logits(base, name)
    assert not torch.equal(before, expected)
    result = load(tmp_path / "out")
    torch.testing.assert_close(logits(result, name), expected, atol=2e-6, rtol=0)
    assert report.fingerprint == model_fingerprint(result, find_moe_layers(result))
    assert report.audit.reload == "strict"


def test_only_experts_routers_and_counts_change(family, tmp_path):
    _, source, _ = family
    prune_checkpoint(source, plan_for(source, KEPT), tmp_path / "out")
    checkpoint = inventory(source)
    before, after = contents(source), contents(tmp_path / "out")
    cut = {tensor.name: tensor for tensor in checkpoint.tensors if tensor.role != "other"}
    assert {n: v for n, v in before.items() if n not in cut} == {n: v for n, v in after.items() if n not in cut}
    for tensor in cut.values():
        dtype, shape, data = before[tensor.name]
        if tensor.role == "expert" and tensor.expert in KEPT:
            name = tensor.name.replace(f"experts.{tensor.expert}.", f"experts.{KEPT.index(tensor.expert)}.")
            assert after[name] == before[tensor.name]
        elif tensor.role == "table":
            assert after[tensor.name][:2] == (dtype, shape)
        elif tensor.role != "expert":
            # All but [1, 8] have axis 0. What follows the experts' rows stays.
            row = len(data) // shape[tensor.axis]
            each, end = row * tensor.size, 8 * row * tensor.size
            rows = [data[i * each : (i + 1) * each] for i in KEPT] + [data[end:]]
            length = len(KEPT) * tensor.size + tensor.extra
            expected = tuple(length if axis == tensor.axis else size for axis, size in enumerate(shape))
            assert after[tensor.name] == (dtype, expected, b"".join(rows))
    changes = set(
        changed(
            json.loads((source / "config.json").read_text()), json.loads((tmp_path / "out" / "config.json").read_text())
        )
    )
    assert {(old, new) for _, old, new in changes} == {(8, 6)}
    assert all(path[-1] in COUNT_KEYS and "vision_config" not in path for path, _, _ in changes)


def changed(a, b, path=()):
    """(path, old, new) of every value that differs; keys and their order must not."""
    if isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            yield from changed(a[key], b[key], (*path, key))
    elif a != b:
        yield path, a, b


def test_permuting_experts_changes_nothing(family, tmp_path):
    name, source, base = family
    checkpoint = inventory(source)
    generator = random.Random(3)
    orders = {}
    for layer in checkpoint.layers:
        size = layer.num_experts // layer.num_groups
        orders[layer.name] = [
            expert
            for g in range(layer.num_groups)
            for expert in generator.sample(range(g * size, (g + 1) * size), size)
        ]
    work = plan_work(checkpoint, expert_edits(checkpoint, orders), config_edits={})
    place = AtomicDirectory(tmp_path / "out", source=source, overwrite=False)
    write_work(work, place, finish=lambda directory, entries: {})
    assert contents(tmp_path / "out") != contents(source)
    torch.testing.assert_close(logits(load(tmp_path / "out"), name), logits(base, name), atol=1e-4, rtol=1e-4)


def test_a_table_of_experts_by_token_follows_the_experts(tmp_path):
    """DeepSeek-V4's first layers list expert ids by token: kept ones keep their place, removed ones are replaced."""
    source = save_tiny("deepseek_v4", tmp_path / "source")
    report = prune_checkpoint(source, plan_for(source, KEPT), tmp_path / "out")
    (table,) = (tensor for tensor in inventory(source).tensors if tensor.role == "table")
    before, after = (tensors_of(path)[table.name] for path in (source, tmp_path / "out"))
    assert before.shape == after.shape == (128, 2)
    kept = torch.isin(before, torch.tensor(KEPT))
    assert torch.equal(torch.tensor(KEPT)[after][kept], before[kept])
    assert (after[:, 0] != after[:, 1]).all()
    assert len(after[~kept].unique()) == len(KEPT), "removed experts' tokens go to all kept ones"
    assert any(f"{100 * (~kept).double().mean():.0f} % of the entries" in warning for warning in report.warnings)


def test_a_table_of_an_unknown_family_is_refused(tmp_path, monkeypatch):
    """Cutting the other tensors alone would leave ids of absent experts."""
    from dataclasses import replace

    monkeypatch.setitem(FAMILIES, "deepseek_v4", replace(FAMILIES["deepseek_v4"], expert_table=""))
    source = save_tiny("deepseek_v4", tmp_path / "source")
    with pytest.raises(InputError, match="tid2eid"):
        inventory(source)


def test_a_missing_class_that_is_no_expert_is_named(tmp_path):
    """transformers 5.24 loads weights for LongCat's identity classes too; without them it would not load the result."""
    source = save_tiny("longcat_flash", tmp_path / "source")
    tensors = tensors_of(source)
    save_single(source, {name: tensor for name, tensor in tensors.items() if ".experts.8." not in name})
    with pytest.raises(InputError, match=r"experts\.8\.\w+_proj\.weight is missing"):
        inventory(source)


# Prefixes of hub checkpoints where transformers 5 saves others.
ON_THE_HUB = {
    "deepseek_v4": ("model.layers.", "layers."),
    "kimi_k25": ("language_model.model.blocks.", "language_model.model.layers."),
}


@pytest.mark.parametrize("name", ON_THE_HUB)
def test_names_of_hub_checkpoints_are_understood_and_kept(name, tmp_path):
    source = save_tiny(name, tmp_path / "source")
    saved, hub = ON_THE_HUB[name]
    save_single(source, {key.replace(saved, hub, 1): tensor for key, tensor in tensors_of(source).items()})
    base, plan = load(source), plan_for(source, KEPT)
    prune_checkpoint(source, plan, tmp_path / "out")
    assert set(contents(tmp_path / "out")) < set(contents(source))
    with pruned(base, plan):
        expected = logits(base, name)
    torch.testing.assert_close(logits(load(tmp_path / "out"), name), expected, atol=2e-6, rtol=0)
