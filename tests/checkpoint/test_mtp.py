"""Multi-token-prediction layers hold experts of their own: refused, or dropped together with their count (R16, R17)."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from moeprune.artifacts.errors import InputError
from moeprune.checkpoint.inventory import inventory
from moeprune.checkpoint.prune import prune_checkpoint
from tests.checkpoint.sources import KEPT, add_shard, contents, edit_config, plan_for, tensors_of
from tests.tiny import save_tiny

MTP_PREFIX = {"deepseek_v3": "model.layers.2", "glm4_moe": "model.layers.2", "qwen3_next": "mtp.layers.0"}


def with_mtp(name, directory):
    """A checkpoint whose last file is a multi-token-prediction layer, as the hub has them."""
    source = save_tiny(name, directory, dtype="bfloat16", shard_size="30KB")
    layer, prefix = "model.layers.1.", MTP_PREFIX[name] + "."
    block = {n.replace(layer, prefix): t for n, t in tensors_of(source).items() if n.startswith(layer)}
    extra = {
        "model.layers.2.eh_proj.weight",
        "model.layers.2.embed_tokens.weight",
        "model.layers.2.shared_head.head.weight",
    }
    extra = {"mtp.fc.weight", "mtp.norm.weight"} if name == "qwen3_next" else extra
    add_shard(source, "model-mtp.safetensors", block | {n: torch.ones(4, 32, dtype=torch.bfloat16) for n in extra})
    if name != "qwen3_next":
        assert edit_config(source)["num_nextn_predict_layers"] == 1
    return source


@pytest.mark.parametrize("name", MTP_PREFIX)
def test_refused_unless_told_otherwise(name, tmp_path):
    source = with_mtp(name, tmp_path / "source")
    checkpoint = inventory(source)
    assert {t.name for t in checkpoint.mtp} == {
        n for n in contents(source) if n.startswith(("model.layers.2.", "mtp."))
    }
    with pytest.raises(InputError, match=r"(mtp\.|layers\.2\.).*checkpoint\.mtp=drop"):
        prune_checkpoint(source, plan_for(source), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", MTP_PREFIX)
def test_dropped_with_their_count(name, tmp_path):
    source = with_mtp(name, tmp_path / "source")
    report = prune_checkpoint(source, plan_for(source), tmp_path / "out", mtp="drop")
    before, after = contents(source), contents(tmp_path / "out")
    experts_gone = 2 * 3 * len(inventory(source).layers)
    mtp = [n for n in before if n.startswith(("model.layers.2.", "mtp."))]
    assert len(after) == len(before) - len(mtp) - experts_gone
    assert report.audit.dropped == len(mtp) + experts_gone
    assert not any(n.startswith(("model.layers.2.", "mtp.")) for n in after)
    assert not (tmp_path / "out" / "model-mtp.safetensors").exists()
    # Whatever else was in files of its own is still there: embeddings, head, norms.
    rest = [n for n in before if n not in mtp and ".experts." not in n and ".mlp.gate." not in n]
    assert {n: before[n] for n in rest} == {n: after[n] for n in rest}
    if name != "qwen3_next":
        assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert report.mtp == "dropped"
    assert any("speculative decoding" in warning for warning in report.warnings)
    assert "peculative decoding" in (tmp_path / "out" / "README.md").read_text()
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())


def test_a_count_without_layers_is_left_alone(tmp_path):
    """transformers drops these layers on save and leaves the count; that state of the source is not our business."""
    source = save_tiny("glm4_moe", tmp_path / "source")
    prune_checkpoint(source, plan_for(source), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 1


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_correction_biases_are_cut_by_the_same_map(name, tmp_path):
    source = save_tiny(name, tmp_path / "source", dtype="bfloat16", shard_size="30KB")
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    (shard,) = [path for path in source.glob("*.safetensors") if bias in path.read_bytes().decode("latin-1")]
    from safetensors.torch import load_file, save_file

    tensors = load_file(shard)
    tensors[bias] = torch.arange(8, dtype=torch.float32) * 0.1
    save_file(tensors, shard, metadata={"format": "pt"})
    prune_checkpoint(source, plan_for(source), tmp_path / "out")
    assert torch.equal(tensors_of(tmp_path / "out")[bias], torch.tensor(KEPT, dtype=torch.float32) * 0.1)
