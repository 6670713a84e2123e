"""`dense:` in a run and in a grid: experts first, then weights, one checkpoint, measured as it loads again."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import read_json
from moeprune.commands.check import check_file
from moeprune.commands.inspect import inspect_path
from moeprune.evaluation.fidelity import compare, logits_of
from moeprune.models.loading import load_tokenizer
from moeprune.run.grid import run_grid
from moeprune.run.pipeline import run_file
from moeprune.run.run_data import Inputs

pytestmark = pytest.mark.usefixtures("plain_figures")

pytest.importorskip("compressed_tensors")
CONFIG = Path(__file__).parents[2] / "configs" / "runs" / "experts-and-dense.yaml"
FEW = [
    "calibration.domains.0.tokens=3000",
    "evaluation.domains.0.tokens=1500",
    "evaluation.domains.1.tokens=1500",
    "evaluation.task_questions=2",
]  # the shipped config with its task and its loops, on less data
GRID = """
base: {base}
axes:
  dense:
    plain: {{dense: []}}
    sparse: {{dense: [{{name: wanda, pattern: "2:4", targets: [attention, routed_expert]}}]}}
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory, plain_figures):
    output = tmp_path_factory.mktemp("runs")
    return run_file(CONFIG, FEW, output=output)


def test_one_checkpoint_of_its_own_stage(finished):
    run = read_json(finished.directory / "run.json")
    assert list(run["stages"]) == ["record", "select", "prune", "dense", "evaluate", "report"]
    prune, dense = run["stages"]["prune"], run["stages"]["dense"]
    assert dense["checkpoint"] == "checkpoint"
    assert dense["parameters"] == prune["parameters"]
    assert dense["bytes"] < prune["bytes"] < dense["bytes_base"]
    assert {row["role"]: row["methods"] for row in dense["coverage"]}["attention"] == "fp8"
    left = {path.name for path in finished.directory.iterdir() if "pruned" in path.name or "moeprune" in path.name}
    assert not left
    record = read_json(finished.directory / "checkpoint" / "moeprune.json")
    assert len(record["plan"]["layers"]) == 4
    assert record["dense"][0]["methods"] == [{**record["dense"][0]["methods"][0], "name": "fp8"}]
    assert record["sizes"]["bytes_base"] == dense["bytes_base"]


def test_the_report_and_inspect_tell_of_the_weights(finished):
    report = (finished.directory / "report.md").read_text()
    section = report.partition("## Dense weights")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line]
    by_role = {row[0]: row for row in rows}
    assert by_role["attention"][1] == "fp8"
    assert by_role["attention"][5] == "8.12"  # eight bits and a scale a channel
    assert by_role["routed expert"][1].startswith("unchanged")
    assert by_role["routed expert"][4:6] == ["–", "–"]
    assert re.search(r"compressed in \d.* s: \d.* of 7.77 MB on disk", section)
    assert "| dense |" in report.partition("## Provenance")[2]
    lines = "\n".join(inspect_path(finished.directory / "checkpoint")[0])
    assert "64 of 128 experts pruned from" in lines
    assert re.search(r"weights compressed by fp8: 16 weights with", lines)


def test_metrics_are_those_of_the_final_checkpoint(finished, reference):
    metrics, run = finished.metrics, read_json(finished.directory / "run.json")
    assert metrics["size/bytes"] == run["stages"]["dense"]["bytes"]
    assert metrics["dense/attention/bits"] == 8.125
    assert 0 <= metrics["task/accuracy/agent"] <= 1
    assert {"generation/loop_rate", "generation/loop_rate/base", "task/accuracy/agent/base"} <= set(metrics)
    student = AutoModelForCausalLM.from_pretrained(finished.directory / "checkpoint", dtype="auto").eval()
    with torch.no_grad():
        student(input_ids=torch.arange(8)[None])
    tokens = Inputs(_config(finished)).data.evaluation
    students = {"": logits_of(student.to(torch.float32))}
    again = compare(logits_of(reference.model), students, tokens)[""].metrics()
    assert again["fidelity/kl/agent"] == pytest.approx(metrics["fidelity/kl/agent"], rel=1e-5)


def test_stock_transformers_loads_it_and_generates(finished):
    directory = finished.directory / "checkpoint"
    model, info = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config.num_experts == 16
    ids = load_tokenizer(directory)("def add(a, b):", return_tensors="pt")["input_ids"]
    out = model.eval().generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert out.shape[1] == ids.shape[1] + 8


def test_done_stages_are_reused_and_a_stopped_one_starts_from_the_plan(finished, caplog):
    before = (finished.directory / "metrics.json").read_bytes()
    with caplog.at_level("INFO", logger="moeprune"):
        run_file(CONFIG, FEW, output=finished.directory.parent)
    assert (finished.directory / "metrics.json").read_bytes() == before
    run = read_json(finished.directory / "run.json")
    key = run["stages"].pop("dense")["key"]  # as if it had been stopped after the checkpoint was in place
    (finished.directory / "run.json").write_text(json.dumps(run))
    again = run_file(CONFIG, FEW, output=finished.directory.parent)
    assert read_json(finished.directory / "run.json")["stages"]["dense"]["key"] == key
    assert (finished.directory / "metrics.json").read_bytes() == before
    assert again.metrics == finished.metrics
    assert not (finished.directory / "pruned").exists()


def test_without_a_checkpoint_it_is_refused_in_runs_and_grids(tmp_path):
    with pytest.raises(InputError, match=r"set checkpoint\.save=true"):
        run_file(CONFIG, [*FEW, "checkpoint.save=false"], output=tmp_path / "runs")
    grid = tmp_path / "grid.yaml"
    grid.write_text(GRID.format(base=CONFIG))
    with pytest.raises(InputError, match=r"set checkpoint\.save=true"):
        run_grid(grid, ["checkpoint.save=false"], output=tmp_path / "runs")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["grid.yaml"]


def test_targets_that_match_nothing_stop_the_run_before_it_records(tmp_path):
    with pytest.raises(InputError, match="matches nothing"):
        run_file(CONFIG, [*FEW, "dense.0.targets=[shared_expert]"], output=tmp_path / "runs")
    with pytest.raises(InputError, match="matches nothing"):
        check_file(CONFIG, [*FEW, "dense.0.targets=[shared_expert]"])
    assert not list(tmp_path.rglob("statistics.safetensors"))


def test_a_grid_measures_compressed_models_each_for_itself(tmp_path):
    grid = tmp_path / "grid.yaml"
    grid.write_text(GRID.format(base=CONFIG))
    few = [*FEW, "evaluation.tasks=[]", "evaluation.loops=false", "evaluation.baselines=[{name: reap}]"]
    outcome = run_grid(grid, few, output=tmp_path / "runs")
    assert not outcome.failed
    metrics = {name: read_json(tmp_path / "runs" / "grid" / name / "metrics.json") for name in outcome.done}
    assert set(metrics) == {"plain", "sparse"}
    assert metrics["sparse"]["dense/routed_expert/sparsity"] >= 0.5
    assert not any(name.startswith("dense/") for name in metrics["plain"])
    assert metrics["sparse"]["fidelity/kl/agent"] > metrics["plain"]["fidelity/kl/agent"]
    assert metrics["sparse"]["size/bytes"] == metrics["plain"]["size/bytes"]  # zeros are stored
    baseline = "baseline/reap/fidelity/kl/agent"  # which only loses experts
    assert metrics["sparse"][baseline] == metrics["plain"][baseline] > 0
    assert not any(name.startswith("baseline/reap/dense") for name in metrics["sparse"])


def _config(finished):
    from moeprune.config.load import load_run

    return load_run(finished.directory / "config.yaml")
