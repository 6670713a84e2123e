"""`moeprune compress` with one block in memory: the bytes of the walk in memory, after a kill too."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest

from moeprune.artifacts.errors import InputError
from moeprune.checkpoint.prune import prune_checkpoint
from moeprune.commands.compress import compress_file
from moeprune.commands.evaluate import evaluate_model
from moeprune.config.load import load_run
from moeprune.dense import drivers
from moeprune.models import memory
from moeprune.run import dense_stage
from moeprune.run.pipeline import run_file
from tests.checkpoint.sources import plan_for
from tests.tiny import save_tiny

pytest.importorskip("compressed_tensors")
RUN = Path(__file__).parents[2] / "configs" / "runs" / "experts-and-dense.yaml"
DATA = "calibration: {domains: [{name: agent, path: 'reference:agent', tokens: 3000}]}\n"
SPARSE = """
dense:
  - {name: sparsegpt, pattern: "2:4", targets: [attention, routed_expert], minimum_tokens: 1}
  - {name: fp8, targets: [attention]}
"""
INT4 = "dense: [{name: gptq, group_size: 8, minimum_tokens: 1, targets: [attention, routed_expert]}]\n"
BARE = "dense: [{name: magnitude, pattern: '2:4', targets: [attention, routed_expert]}, {name: fp8}]\n"


def weights_of(directory):
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.suffix == ".safetensors"}


def compressed(source, text, target, streaming):
    config = target.with_suffix(".yaml")
    config.write_text(f"{text}runtime: {{streaming: {streaming}}}\n")
    return compress_file(str(source), config, target, overwrite=False)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(a checkpoint of three layers in many files, `calibration:` with a text for it)."""
    folder = tmp_path_factory.mktemp("tiny")
    source = save_tiny("qwen3_moe", folder / "source", dtype="bfloat16", shard_size="30KB", num_hidden_layers=3)
    (folder / "text.jsonl").write_text(json.dumps({"text": "one two three four five six seven eight " * 8}) + "\n")
    return source, f"calibration: {{domains: [{{name: text, path: '{folder}/text.jsonl'}}], template: plain}}\n"


@pytest.mark.parametrize("text", [SPARSE, INT4, BARE], ids=["sparse", "int4", "no data"])
def test_the_bytes_do_not_depend_on_streaming(text, tiny, tmp_path):
    source, data = tiny
    text += "" if text == BARE else data
    plain = compressed(source, text, tmp_path / "plain", "off")
    streamed = compressed(source, text, tmp_path / "streamed", "on")
    assert weights_of(tmp_path / "plain") == weights_of(tmp_path / "streamed")
    assert (tmp_path / "plain" / "config.json").read_text() == (tmp_path / "streamed" / "config.json").read_text()
    assert streamed["dense"] == plain["dense"]
    assert streamed["reloaded"]["weights"] == plain["reloaded"]["weights"]
    assert streamed["reloaded"]["sparsity"] == plain["reloaded"]["sparsity"]
    assert streamed["warnings"] == plain["warnings"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plain", "plain.yaml", "streamed", "streamed.yaml"]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "qwen3"])
def test_a_pruned_and_a_dense_checkpoint(family, tmp_path):
    source = save_tiny(family, tmp_path / "source", dtype="bfloat16", shard_size="30KB", num_hidden_layers=3)
    if family != "qwen3":
        prune_checkpoint(source, plan_for(source, (0, 2, 3, 5, 6)), tmp_path / "pruned")
        source = tmp_path / "pruned"
    role = "dense_mlp" if family == "qwen3" else "routed_expert"
    method = f"dense: [{{name: wanda, pattern: '2:4', minimum_tokens: 1, targets: [attention, {role}]}}]\n"
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "one two three four five six seven eight " * 8}) + "\n")
    data = f"calibration: {{domains: [{{name: text, path: '{tmp_path}/text.jsonl'}}], template: plain}}\n"
    for streaming in ("off", "on"):
        summary = compressed(source, method + data, tmp_path / streaming, streaming)
        assert summary["reloaded"]["sparsity"] >= 0.5
    assert weights_of(tmp_path / "off") == weights_of(tmp_path / "on")


def test_auto_streams_what_does_not_fit_and_refuses_what_the_disk_does_not_hold(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(drivers, "free_bytes", lambda device: 1_000_000)
    with caplog.at_level("INFO", logger="moeprune"):
        compressed("reference", BARE, tmp_path / "out", "auto")
    assert "read block by block" in caplog.text
    usage = namedtuple("usage", "free")(10_000)
    monkeypatch.setattr(drivers.shutil, "disk_usage", lambda path: usage)
    for streaming in ("off", "on"):
        with pytest.raises(InputError, match=r"GiB are needed there .* are free"):
            compressed("reference", BARE, tmp_path / "other", streaming)
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
@pytest.mark.parametrize("streaming", ["on", "off"])
def test_killed_in_the_middle_it_ends_with_the_same_bytes(streaming, tmp_path):
    """Killed after one block, after three, and while it writes; the fourth call finishes."""
    text = SPARSE + DATA
    compressed("reference", text, tmp_path / "whole", streaming)
    config = tmp_path / "c.yaml"
    config.write_text(f"{text}runtime: {{streaming: {streaming}}}\n")
    command = [sys.executable, "-m", "moeprune", "compress", "reference", str(config), "-o", str(tmp_path / "out")]
    state, partial = tmp_path / ".out.moeprune-dense", tmp_path / ".out.moeprune-partial"
    marks = [state / "block-0000.json", state / "block-0002.json", partial / "checkpoint"]
    for mark in marks:
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        while not mark.exists():
            assert run.poll() is None, "it ended before it could be killed"
            time.sleep(0.002)
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
        assert not (tmp_path / "out").exists()
        finished = {path: path.stat().st_mtime_ns for path in state.glob("block-*.json")}
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(finished) == 4  # nothing was left to do but to write
    assert weights_of(tmp_path / "out") == weights_of(tmp_path / "whole")
    first, second = (json.loads((tmp_path / name / "moeprune.json").read_text()) for name in ("out", "whole"))
    assert first["dense"] == second["dense"]
    assert not state.exists()
    assert not partial.exists()


def test_a_run_with_one_block_in_memory(tmp_path):
    """Record, prune, compress and measure without ever holding the model: the numbers of a run that does."""
    few = [f"{part}.tokens=1000" for part in ("calibration.domains.0", "evaluation.domains.0", "evaluation.domains.1")]
    few += ["evaluation.tasks=[]", "evaluation.baselines=[{name: reap}]"]
    plain = run_file(RUN, [*few, "runtime.streaming=off", "evaluation.loops=false"], output=tmp_path / "plain")
    streamed = run_file(RUN, [*few, "runtime.streaming=on", "evaluation.loops=true"], output=tmp_path / "streamed")
    assert weights_of(plain.directory / "checkpoint") == weights_of(streamed.directory / "checkpoint")
    assert streamed.metrics == pytest.approx(plain.metrics, rel=1e-4, abs=1e-7)
    assert any("fidelity alone is measured" in warning for warning in streamed.warnings)


@pytest.mark.parametrize("free", [10**12, 10**3], ids=["in memory", "layer by layer"])
def test_a_compressed_dense_model_is_measured_against_its_base(free, tmp_path, monkeypatch):
    source = save_tiny("qwen3", tmp_path / "source", dtype="bfloat16", num_hidden_layers=3)
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "one two three four five six seven eight " * 8}) + "\n")
    compressed(source, "dense: [{name: magnitude, pattern: '2:4'}]\n", tmp_path / "out", "auto")
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    result = evaluate_model(
        str(tmp_path / "out"),
        tmp_path / "metrics.json",
        against=str(source),
        data=[f"text={tmp_path}/text.jsonl"],
        speed=free < 10**6,
    )
    assert result["metrics"]["fidelity/kl/text"] > 1e-4
    assert any("speed: the model does not fit" in warning for warning in result["warnings"]) == (free < 10**6)
    same = evaluate_model(
        str(source),
        tmp_path / "same.json",
        against=str(source),
        data=[f"text={tmp_path}/text.jsonl"],
    )
    assert same["metrics"]["fidelity/kl/text"] == pytest.approx(0, abs=1e-9)


def test_a_mix_is_said_to_decide_about_experts_only():
    config = load_run(RUN, ["selection.mix={agent: 3.0}", "dense=[{name: wanda, targets: [attention]}]"])
    assert "every calibration token counts the same" in dense_stage.unmixed(config)[0]
    assert not dense_stage.unmixed(load_run(RUN, ["selection.mix={agent: 3.0}", "dense=[{name: fp8}]"]))
    assert not dense_stage.unmixed(load_run(RUN, ["dense=[{name: wanda, targets: [attention]}]"]))
