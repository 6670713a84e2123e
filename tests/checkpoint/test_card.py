"""What the card says about serving, and the table of proofs on it."""

import json
import stat

import pytest

from moeprune.checkpoint.prune import prune_checkpoint
from moeprune.checkpoint.record import keep_proof, keep_results, with_table
from moeprune.commands.check import check_file
from moeprune.reference import MODEL_DIR
from moeprune.serving.install import requirements_of
from tests.checkpoint.sources import plan_for
from tests.tiny import save_tiny

PROOF = {
    "engine": "vllm",
    "version": "0.32.0",
    "dtype": "float32",
    "tokens": 96,
    "tokens_equal": 96,
    "difference_mean": 1e-6,
    "difference_most": 2e-6,
    "tolerance": {"tie": 1e-4},
    "tokenizer": "equal",
    "chats": {"a chat": "equal", "a chat with tools": "refused: x"},
    "compared_with": "the base model pruned in memory",
    "passed": True,
}


def test_the_card_tells_how_to_serve_split_and_upload(tmp_path):
    report = prune_checkpoint(MODEL_DIR, plan_for(MODEL_DIR, range(12)), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "vllm serve . --enable-auto-tool-choice --tool-call-parser hermes\n" in card
    assert "--tensor-parallel-size 2 --enable-expert-parallel" in card
    assert "over 2, 4 devices" in card
    assert "12 experts by 2, 4." in card
    assert "hf upload YOUR-NAME/moeprune-reference-12-experts . ." in card
    assert any("no tuned fused-MoE configuration for 12 experts" in line for line in report.advice)
    assert all(line in card for line in report.advice)
    assert report.warnings == ()


def test_a_group_that_does_not_divide_would_be_a_warning_of_the_report(tmp_path):
    source = save_tiny("deepseek_v3", tmp_path / "source", num_nextn_predict_layers=0)
    report = prune_checkpoint(source, plan_for(source), tmp_path / "out")  # three in each of two groups: fine
    assert report.warnings == ()


def test_check_tells_before_anything_is_loaded(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("calibration: {domains: [{name: agent, path: 'reference:agent', tokens: 2000}]}\n")
    assert check_file(path, [])["serving"] == []  # 16 experts of 32
    text, _ = check_file(path, ["selection.budget.prune=20"])["serving"]
    assert "12 experts" in text
    assert "benchmark_moe.py --tune" in text


def test_files_can_be_read_by_everybody_and_written_by_the_owner(tmp_path):
    source = save_tiny("qwen3_moe", tmp_path / "source")
    for path in source.iterdir():
        path.chmod(0o400)
    prune_checkpoint(source, plan_for(source), tmp_path / "out")
    for path in (tmp_path / "out").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) & 0o600 == 0o600, path


def test_proofs_replace_those_of_their_name_and_keep_the_rest_of_the_card(tmp_path):
    prune_checkpoint(MODEL_DIR, plan_for(MODEL_DIR, range(16)), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    keep_proof(tmp_path / "out", "vllm float32", {**PROOF, "passed": False})
    keep_proof(tmp_path / "out", "vllm float32", PROOF)
    keep_proof(tmp_path / "out", "llama.cpp x.gguf", {**PROOF, "engine": "llama.cpp", "tolerance": None})
    record = json.loads((tmp_path / "out" / "moeprune.json").read_text())
    assert sorted(record["serving"]) == ["llama.cpp x.gguf", "vllm float32"]
    told = (tmp_path / "out" / "README.md").read_text()
    assert told.count("Verified in serving engines") == 1
    assert "| vllm 0.32.0 | float32 | 96 of 96 |" in told
    assert "1 of 2 chats equal | as in memory |" in told
    assert "quantised: measured only" in told
    begin, end = told.index("\n<!-- moeprune:verified"), told.index("<!-- /moeprune:verified -->")
    rest = told[:begin] + told[end + len("<!-- /moeprune:verified -->") :]
    assert rest.split() == card.split()


def test_results_stand_beside_the_unpruned_model_and_its_intervals(tmp_path):
    prune_checkpoint(MODEL_DIR, plan_for(MODEL_DIR, range(16)), tmp_path / "out")
    metrics = {"fidelity/kl/agent": 0.0246, "fidelity/kl/agent/ci_low": 0.02, "fidelity/kl/agent/ci_high": 0.03}
    metrics |= {"task/accuracy/agent": 0.85, "task/accuracy/agent/base": 1.0, "baseline/reap/fidelity/kl/agent": 1.0}
    for _ in range(2):
        keep_results(tmp_path / "out", metrics)
    keep_proof(tmp_path / "out", "vllm float32", PROOF)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| fidelity/kl/agent | 0.0246 [0.02, 0.03] |  |" in card
    assert "| task/accuracy/agent | 0.85 | 1 |" in card
    assert "reap" not in card
    assert card.count("## Results") == card.count("Verified in serving") == 1
    record = json.loads((tmp_path / "out" / "moeprune.json").read_text())
    assert record["results"]["task/accuracy/agent"] == 0.85
    assert record["serving"]["vllm float32"]["passed"]
    keep_results(MODEL_DIR, metrics)  # not made by moeprune: left alone
    assert not (MODEL_DIR / "moeprune.json").exists()


def test_results_that_cannot_be_kept_are_told(tmp_path, monkeypatch):
    prune_checkpoint(MODEL_DIR, plan_for(MODEL_DIR, range(16)), tmp_path / "out")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert "cannot be written to" in keep_results(tmp_path / "out", {"fidelity/kl/agent": 0.0246})
    assert "results" not in json.loads((tmp_path / "out" / "moeprune.json").read_text())


@pytest.mark.parametrize("heading", ["Model card of the base model", "Card of the checkpoint that was compressed"])
def test_the_proofs_of_a_source_are_not_taken_over(heading):
    own = f"# New\n\n<details>plan</details>\n\n---\n\n## {heading}\n\n"
    card = with_table(own + with_table("# Old\n", {"a": PROOF}), {"a": {**PROOF, "tokens_equal": 95}})
    assert card.count("Verified in serving engines") == 1
    assert card.index("95 of 96") < card.index("# Old")


def test_what_a_wheel_requires_without_torch_and_extras(tmp_path):
    import zipfile

    wheel = tmp_path / "x-1-py3-none-any.whl"
    lines = [
        "torch==2.13.0+cpu; platform_machine == 'x86_64'",
        "torchvision",
        "torch-thing>=1",
        "numpy",
        "av; extra == 'a'",
    ]
    text = "Metadata-Version: 2.1\nName: x\nVersion: 1\n" + "".join(f"Requires-Dist: {line}\n" for line in lines)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("x-1.dist-info/METADATA", text + "\nAbout it.\n")
    assert requirements_of(wheel) == ["torch-thing>=1", "numpy"]
