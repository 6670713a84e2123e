"""The command line on the reference model: one step at a time, then every kind of bad input."""

import contextlib
import gzip
import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest

from moeprune.cli import main
from moeprune.reference import DATA_DIR
from tests.tiny import save_tiny

VARIABLES = {"WANDB_MODE": "disabled", "COLUMNS": "120"}
ENVIRONMENT = os.environ | VARIABLES
SMALL = """
model: {path: reference}
calibration: {domains: [{name: agent, path: 'reference:agent', tokens: 6000}]}
selection: {budget: {prune: 0.5}, solver: {name: swap, certificate: true}}
evaluation:
  domains: [{name: agent, path: 'reference:agent', tokens: 3000}]
  tasks: [agent]
  task_questions: 4
  baselines: [{name: reap}]
tracking: {wandb: disabled}
"""


@dataclass
class Ended:
    returncode: int
    stdout: str
    stderr: str


def moeprune(*words, cwd="."):
    """The command line in this process, which has torch at hand."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(cwd))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        stack.enter_context(patch.dict(os.environ, VARIABLES))
        stack.enter_context(patch.object(sys, "argv", ["moeprune", *map(str, words)]))
        end = stack.enter_context(pytest.raises(SystemExit))
        main()
    return Ended(int(end.value.code or 0), out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """Statistics, plan, checkpoint and metrics, made verb by verb."""
    folder = tmp_path_factory.mktemp("steps")
    heldout = gzip.decompress((DATA_DIR / "agent.heldout.jsonl.gz").read_bytes()).splitlines(keepends=True)
    (folder / "heldout.jsonl").write_bytes(b"".join(heldout[:20]))
    calls = {
        "record": ("record", "reference", "agent=reference:agent", "--tokens", 6000, "-o", "s.safetensors"),
        "select": ("select", "s.safetensors", "--prune", "0.25", "--certificate", "-o", "plan.json"),
        "prune": ("prune", "reference", "plan.json", "-o", "smaller"),
        "evaluate": ("evaluate", "reference", "--plan", "plan.json", "--data", "agent=heldout.jsonl"),
    }
    done = {name: moeprune(*call, cwd=folder) for name, call in calls.items()}
    return folder, done


def test_the_last_line_is_the_path_of_what_was_written(steps):
    folder, done = steps
    for name, written in [
        ("record", "s.safetensors"),
        ("select", "plan.json"),
        ("prune", "smaller"),
        ("evaluate", "metrics.json"),
    ]:
        assert done[name].returncode == 0, done[name].stderr
        assert done[name].stdout.splitlines()[-1] == written
        assert (folder / written).exists()


def test_the_steps_fit_together(steps):
    folder, _ = steps
    plan = json.loads((folder / "plan.json").read_text())
    assert [len(layer["kept"]) for layer in plan["layers"]] == [24] * 4
    config = json.loads((folder / "smaller" / "config.json").read_text())
    assert config["num_experts"] == 24
    metrics = json.loads((folder / "metrics.json").read_text())
    assert 0 < metrics["fidelity/kl/agent"] < 1


def test_a_written_checkpoint_measures_like_the_plan_in_memory(steps):
    folder, _ = steps
    data = ("--data", "agent=heldout.jsonl")
    done = moeprune("evaluate", "smaller", "--against", "reference", *data, "-o", "on-disk.json", cwd=folder)
    assert done.returncode == 0, done.stderr
    in_memory, on_disk = (json.loads((folder / f"{name}.json").read_text()) for name in ("metrics", "on-disk"))
    assert on_disk["fidelity/kl/agent"] == pytest.approx(in_memory["fidelity/kl/agent"], rel=1e-5)


def test_json_is_machine_readable(steps):
    folder, _ = steps
    done = moeprune("inspect", "s.safetensors", "--json", cwd=folder)
    assert json.loads(done.stdout)["domains"]["agent"]["tokens"] == 6000
    done = moeprune("select", "s.safetensors", "-o", "again.json", "--criterion", "reap", "--json", cwd=folder)
    assert json.loads(done.stdout)["criterion"]["name"] == "reap"
    families = json.loads(moeprune("families", "--json").stdout)["families"]
    assert {"model_type", "verified", "how"} <= set(families[0])


def test_select_has_every_limit_of_the_config(steps):
    folder, _ = steps
    limits = ("--scope", "global", "--prune", "0.5", "--floor", "0.375", "--ceiling", "20", "--multiple-of", "2")
    shares = ("--keep-at-least", "agent=0.3", "--protect-super-experts")
    done = moeprune("select", "s.safetensors", "-o", "limits.json", *limits, *shares, "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    budget = {"floor": 0.375, "ceiling": 20, "multiple_of": 2, "keep_at_least": {"agent": 0.3}}
    assert {key: plan["budget"][key] for key in budget} == budget
    assert plan["budget"]["protect_super_experts"] is True
    kept = [len(layer["kept"]) for layer in plan["layers"]]
    assert sum(kept) == 64
    assert all(12 <= count <= 20 and count % 2 == 0 for count in kept)


@pytest.mark.parametrize("path", ["s.safetensors", "plan.json", "smaller", "metrics.json", "reference"])
def test_everything_can_be_inspected(steps, path):
    done = moeprune("inspect", path, cwd=steps[0])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("select", "s.safetensors", "-o", "p.json", "--prune", "0"), "would remove nothing"),
        (("select", "s.safetensors", "-o", "p.json", "--prune", "1.0"), "between 0 and 1"),
        (("select", "s.safetensors", "-o", "p.json", "--prune", "25.0"), "for 25 % write 0.25"),
        (("select", "s.safetensors", "-o", "p.json", "--prune", "50%"), "not a number"),
        (("select", "s.safetensors", "-o", "p.json", "--prune", "nan"), "not a"),
        (("select", "s.safetensors", "-o", "p.json", "--prune", "29"), "top_k=4"),
        (("select", "s.safetensors", "-o", "p.json", "--criterion", "hoope"), "'hope'"),
        (("select", "s.safetensors", "-o", "p.json", "--criterion", "ean_ca"), "statistics"),
        (("select", "s.safetensors", "-o", "p.json", "--solver", "swop"), "'swap'"),
        (("select", "s.safetensors", "-o", "p.json", "--mix", "prose=2"), "unknown domain 'prose'"),
        (("select", "s.safetensors", "-o", "p.json", "--mix", "agent=x"), "not a number"),
        (("select", "s.safetensors", "-o", "p.json", "--keep-at-least", "prose=0.9"), "'prose' is not a mixed domain"),
        (("select", "s.safetensors", "-o", "p.json", "--keep-at-least", "most"), "not a number"),
        (("select", "s.safetensors", "-o", "p.json", "--floor", "50%"), "not a number"),
        (("select", "s.safetensors", "-o", "p.json", "--ceiling", "4"), "selection.budget.ceiling is 4"),
        (("select", "s.safetensors", "-o", "p.txt"), "ends in .json"),
        (("select", "none.safetensors", "-o", "p.json"), "no such statistics file"),
        (("select", "plan.json", "-o", "p.json"), "not a readable statistics file"),
        (("select", "empty.safetensors", "-o", "p.json"), "not a readable statistics file"),
        (("record", "reference", "agent=none.jsonl", "-o", "x.safetensors"), "does not exist"),
        (("record", "reference", "a=empty.jsonl", "-o", "x.safetensors"), "empty.jsonl"),
        (("record", "reference", "a=broken.jsonl", "-o", "x.safetensors"), "broken.jsonl:2"),
        (("record", "reference", "a=reference:agent", "-o", "x.safetensors", "--count", "user"), "count"),
        (("record", "nowhere/at/all", "a=reference:agent", "-o", "x.safetensors"), "does not exist"),
        (("record", "dense", "a=reference:agent", "-o", "x.safetensors"), "moeprune compress"),
        (("record", "unknown", "a=reference:agent", "-o", "x.safetensors"), "qwen9_moe"),
        (("prune", "reference", "plan.json", "-o", "full"), "overwrite"),
        (("prune", "other", "plan.json", "-o", "x"), "another model"),
        (("prune", "reference", "s.safetensors", "-o", "x"), "not a JSON file"),
        (("prune", "reference", "metrics.json", "-o", "x"), "not a prune plan"),
        (("evaluate", "reference"), "--plan PLAN"),
        (("evaluate", "other", "--plan", "plan.json", "--data", "a=reference:agent"), "another model"),
        (("evaluate", "reference", "--plan", "plan.json", "-o", "plan.json"), "holds no metrics"),
        (("evaluate", "other", "--against", "reference", "--data", "a=reference:agent"), "a vocabulary of 128 tokens"),
        (("inspect", "nothing"), "no such file"),
        (("inspect", "smaller/model.safetensors"), "expected 'moeprune.statistics/"),
        (("inspect", "smaller/config.json"), "not a metrics file"),
        (("run", "none.yaml"), "no such config file"),
        (("run", "typo.yaml"), "did you mean 'prune'"),
        (("run", "small.yaml", "--until", "selection"), "unknown stage"),
        (("run", "small.yaml", "selection.budget.prune=29"), "top_k=4"),
        (("report", "nothing"), "no run.json"),
    ],
)
def test_bad_input_is_explained_and_leaves_nothing(steps, words, message):
    folder, _ = steps
    _bad_material(folder)
    before = sorted(path.name for path in folder.iterdir())
    done = moeprune(*words, cwd=folder)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in folder.iterdir()) == before


def _bad_material(folder: Path) -> None:
    if (folder / "dense").exists():
        return
    (folder / "empty.jsonl").write_text("")
    (folder / "empty.safetensors").write_bytes(b"")
    (folder / "broken.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    (folder / "typo.yaml").write_text("selection: {budget: {prun: 0.5}}\n")
    (folder / "small.yaml").write_text(SMALL)
    (folder / "full").mkdir()
    (folder / "full" / "mine.txt").write_text("keep me")
    save_tiny("qwen3", folder / "dense")
    save_tiny("qwen3_moe", folder / "other")
    save_tiny("qwen3_moe", folder / "unknown")
    config = folder / "unknown" / "config.json"
    config.write_text(config.read_text().replace('"qwen3_moe"', '"qwen9_moe"'))


def test_a_model_against_itself_is_said_to_be_unpruned(steps):
    data = ("--data", "agent=heldout.jsonl", "-o", "self.json")
    done = moeprune("evaluate", "reference", "--against", "reference", *data, cwd=steps[0])
    assert done.returncode == 0, done.stderr
    assert "reference and reference are the same checkpoint; nothing was pruned" in done.stderr
    (steps[0] / "self.json").unlink()


def test_help_is_quick():
    fastest = min(_seconds("--help") for _ in range(3))
    assert fastest < 1.0


def _seconds(*words):
    started = time.monotonic()
    subprocess.run([sys.executable, "-m", "moeprune", *words], capture_output=True, env=ENVIRONMENT, check=True)
    return time.monotonic() - started


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_like_one_that_was_not(tmp_path):
    (tmp_path / "small.yaml").write_text(SMALL)
    calm = moeprune("run", "small.yaml", "--output", "calm", cwd=tmp_path)
    assert calm.returncode == 0, calm.stderr
    for seconds in (3.0, 5.0, 7.0):
        process = subprocess.Popen(
            [sys.executable, "-m", "moeprune", "run", "small.yaml", "--output", "killed"],
            cwd=tmp_path,
            env=ENVIRONMENT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = moeprune("run", "small.yaml", "--output", "killed", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("plan.json", "metrics.json", "baselines/reap/plan.json"):
        assert (tmp_path / "killed" / "small" / name).read_bytes() == (tmp_path / "calm" / "small" / name).read_bytes()
    again = moeprune("run", "small.yaml", "--output", "killed", cwd=tmp_path)
    assert "already done" in again.stderr
    assert (tmp_path / "calm" / "small" / "report.html").is_file()


def test_ctrl_c_ends_with_130_and_says_how_to_go_on(monkeypatch, capsys):
    def stopped():
        raise KeyboardInterrupt

    monkeypatch.setattr("moeprune.commands.inspect.families_table", stopped)
    monkeypatch.setattr(sys, "argv", ["moeprune", "families"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert "the same command goes on" in capsys.readouterr().err
