"""`moeprune compress`: dense weights of MoE, pruned and dense models, from checkpoint to checkpoint."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.statistics import RoutingStatistics
from moeprune.commands.compress import compress_file
from moeprune.models.loading import load_tokenizer
from tests.test_cli import moeprune
from tests.tiny import save_tiny

pytest.importorskip("compressed_tensors")
CONFIG = """
dense:
  - {name: sparsegpt, pattern: "2:4", targets: [attention]}
  - {name: fp8, targets: [attention]}
calibration:
  domains: [{name: agent, path: 'reference:agent', tokens: 2000}]
"""
TEXT = json.dumps({"text": "one two three four five six seven eight nine ten " * 8}) + "\n"


@pytest.fixture
def config(tmp_path):
    def write(text):
        path = tmp_path / "compress.yaml"
        path.write_text(text)
        return path

    return write


def generates(directory):
    tokenizer = load_tokenizer(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()
    ids = torch.tensor([tokenizer("def add(a, b):")["input_ids"]])
    return model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False).shape[1] - ids.shape[1]


def test_the_reference_model_through_the_command_line(tmp_path):
    (tmp_path / "c.yaml").write_text(CONFIG)
    done = moeprune("compress", "reference", "c.yaml", "-o", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "out"
    assert "attention      sparsegpt + fp8" in done.stderr
    assert "routed_expert  unchanged: no target names it" in done.stderr
    assert "warning: zeros are stored as plain numbers" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.yaml", "out"]  # nothing kept of finished blocks
    record = json.loads((tmp_path / "out" / "moeprune.json").read_text())
    assert [method["name"] for method in record["dense"][0]["methods"]] == ["sparsegpt", "fp8"]
    assert record["dense"][0]["metrics"]["dense/attention/sparsity"] >= 0.5
    assert record["dense"][0]["calibration"]["agent"]["tokens"] == 2000
    assert record["sizes"]["bytes"] < record["sizes"]["bytes_base"]
    assert record["audit"]["sparsity"] >= 0.5
    assert "| attention | sparsegpt + fp8 | 16 |" in (tmp_path / "out" / "README.md").read_text()
    assert generates(tmp_path / "out") == 6


def test_a_dense_model_and_the_layout(tmp_path, config):
    source = save_tiny("qwen3", tmp_path / "source", dtype="bfloat16", shard_size="40KB")
    (tmp_path / "text.jsonl").write_text(TEXT)
    data = f"calibration: {{domains: [{{name: text, path: '{tmp_path}/text.jsonl'}}], template: plain}}\n"
    awq = "dense: [{name: awq, group_size: 8, minimum_tokens: 1}]\n"
    with pytest.raises(InputError, match="layout plain"):
        compress_file(str(source), config(awq + data), tmp_path / "out", overwrite=False)
    plain = awq + data + "checkpoint: {layout: plain}\n"
    summary = compress_file(str(source), config(plain), tmp_path / "out", overwrite=False)
    assert (summary["bytes"], summary["parameters"]) == (summary["bytes_base"], summary["bytes_base"] // 2)
    assert {row["role"] for row in summary["dense"]["coverage"] if row["methods"] == "awq"} == {
        "attention",
        "dense_mlp",
    }
    packed = "dense: [{name: gptq, group_size: 8, minimum_tokens: 1}]\n" + data
    summary = compress_file(str(source), config(packed), tmp_path / "out", overwrite=True)
    assert summary["bytes"] < summary["bytes_base"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert generates(tmp_path / "out") == 6
    assert sorted(p.name for p in tmp_path.iterdir()) == ["compress.yaml", "out", "source", "text.jsonl"]


def test_sparse_first_and_quantised_later_keeps_the_zeros_and_the_history(tmp_path, config):
    source = save_tiny("qwen3_moe", tmp_path / "source", dtype="bfloat16")
    sparse = config("dense: [{name: magnitude, pattern: '2:4'}]\n")
    compress_file(str(source), sparse, tmp_path / "sparse", overwrite=False)
    quantised = config("dense: [{name: fp8}]\n")
    summary = compress_file(str(tmp_path / "sparse"), quantised, tmp_path / "both", overwrite=False)
    assert summary["reloaded"]["sparsity"] >= 0.5
    assert any("exact zeros; they are held" in warning for warning in summary["warnings"])
    record = json.loads((tmp_path / "both" / "moeprune.json").read_text())
    assert [done["methods"][0]["name"] for done in record["dense"]] == ["magnitude", "fp8"]
    assert record["base_model"]["name"] == "source"


@pytest.mark.parametrize(
    "options", ["name: gptq, group_size: null", "name: joint, group_size: null", "name: rtn, group_size: null"]
)
def test_one_scale_a_row_is_packed_at_the_first_call(options, tmp_path, config):
    save_tiny("qwen3", tmp_path / "base", dtype="bfloat16")
    (tmp_path / "t.jsonl").write_text(TEXT)
    data = f"calibration: {{domains: [{{name: t, path: '{tmp_path / 't.jsonl'}'}}]}}"
    path = config(f"dense: [{{{options}, targets: [attention]}}]\n{data}")
    compress_file(str(tmp_path / "base"), path, tmp_path / "out", overwrite=False)
    assert generates(tmp_path / "out") == 6
    with pytest.raises(InputError, match=r"packed already \(compressed-tensors\)"):
        compress_file(str(tmp_path / "out"), path, tmp_path / "again", overwrite=False)
    assert not (tmp_path / "again").exists()


def test_a_packed_model_is_recorded_as_it_computes(tmp_path, config):
    path = config("dense: [{name: fp8, targets: [attention]}]")
    compress_file("reference", path, tmp_path / "out", overwrite=False)
    given = ("agent=reference:agent", "--tokens", 500, "--streaming")
    sums = []
    for streaming in ("off", "on"):
        done = moeprune("record", tmp_path / "out", *given, streaming, "-o", tmp_path / f"{streaming}.safetensors")
        assert done.returncode == 0, done.stderr
        sums.append(RoutingStatistics.load(tmp_path / f"{streaming}.safetensors").mix({}))
    for layer, one in sums[0].items():
        torch.testing.assert_close(torch.tensor(one.gate_sum), torch.tensor(sums[1][layer].gate_sum), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("calibration: {}\n", "dense"),
        ("dense: []\n", "dense"),
        ("dense: [{name: sparsgpt}]\n", "did you mean 'sparsegpt'"),
        ("dense: [{name: wanda}]\n", "wanda needs calibration data .* calibration.domains"),
        ("dense: [{name: wanda}]\ncalibration: {sequence_length: 64}\n", "wanda needs calibration data"),
        ("dense: [{name: fp8, targets: [shared_expert]}]\n", "matches nothing; this model has attention"),
        ("dense: [{name: fp8}, {name: magnitude}]\n", "undoes the quantisation"),
        ("dense: [{name: fp8}]\nselection: {}\n", "unknown key selection"),
        ("dense: [{name: magnitude, sparsity: 0.0001}]\n", "less than one, so nothing would go; give at least 0.032"),
    ],
)
def test_bad_input_is_refused_and_leaves_nothing(text, message, tmp_path, config):
    source = save_tiny("qwen3_moe", tmp_path / "source")
    with pytest.raises(InputError, match=message):
        compress_file(str(source), config(text), tmp_path / "out", overwrite=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["compress.yaml", "source"]


def test_a_directory_that_is_not_empty_is_not_replaced(tmp_path, config):
    source = save_tiny("qwen3_moe", tmp_path / "source")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep me")
    with pytest.raises(InputError, match="is not empty"):
        compress_file(str(source), config("dense: [{name: fp8}]\n"), tmp_path / "out", overwrite=False)
