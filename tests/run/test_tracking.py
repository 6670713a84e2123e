"""Records are complete on disk whatever W&B does; offline runs hold config, history, summary. Real W&B, no network."""

import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from moeprune.config.schema import TrackingOptions
from moeprune.run.tracking import Tracker, open_tracker, read_records

CONFIG = {"model": {"path": "reference"}, "selection": {"budget": {"prune": 0.5}}, "tags": ["a", "b"]}
OFFLINE = TrackingOptions(wandb="offline", project="tests", group="grid", tags=("x", "y"))
DISABLED = TrackingOptions(wandb="disabled")


@pytest.fixture(autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home without W&B settings, keys or caches, which must stay empty."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    yield home
    assert [path for path in home.rglob("*") if path.is_file()] == []


def opened(run_dir: Path, options: TrackingOptions) -> Tracker:
    return open_tracker(options, run_dir=run_dir, name="hope-p50", config=CONFIG, job_type="run")


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a W&B transaction log: LevelDB's log format (7-byte headers in 32 KiB blocks), protobuf inside."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, part = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        length, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        part = (b"" if kind in (1, 2) else part) + data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(part)
            yield record


def offline_logs(run_dir: Path) -> list[Path]:
    """Logs of finished runs. W&B's own process writes the last records, on a loaded machine a little later."""
    logs = sorted((run_dir / "wandb").glob("offline-run-*/*.wandb"))
    deadline = time.monotonic() + 120
    while not all(exits(log) for log in logs) and time.monotonic() < deadline:
        time.sleep(0.2)
    return logs


def exits(log: Path) -> list[int]:
    return [record.exit.exit_code for record in wandb_records(log) if record.WhichOneof("record_type") == "exit"]


def history(log: Path) -> list[dict[str, Any]]:
    rows = [record.history for record in wandb_records(log) if record.WhichOneof("record_type") == "history"]
    return [{"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in row.item} for row in rows]


def summary(log: Path) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for record in wandb_records(log):
        if record.WhichOneof("record_type") == "summary":
            values |= {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.summary.update}
    return values


def run_of(log: Path) -> Any:
    return next(record.run for record in wandb_records(log) if record.WhichOneof("record_type") == "run")


def test_records_are_complete_without_wandb(tmp_path: Path) -> None:
    plan = tmp_path / "run" / "plan.json"
    with opened(tmp_path / "run", DISABLED) as tracker:
        plan.write_text("{}")
        tracker.log({"kl": np.float64(0.5), "bad": float("nan"), "count": np.int64(3)}, step=7)
        tracker.table("layers", ["layer", "kept"], [["a", 16], ["b", None]])
        tracker.image("map", tmp_path / "run" / "figures" / "map.png")
        tracker.artifact("plan", "plan", [plan], {"statistics_key": "abc"})
    start, log, table, image, artifact = read_records(tmp_path / "run" / "metrics.jsonl")
    assert start["config"] == CONFIG
    assert start["name"] == "hope-p50"
    assert log["step"] == 7
    assert log["metrics"] == {"kl": 0.5, "bad": "nan", "count": 3}
    assert table["rows"] == [["a", 16], ["b", None]]
    assert image["path"] == "figures/map.png"
    assert artifact["paths"] == ["plan.json"]
    assert artifact["metadata"] == {"statistics_key": "abc"}
    assert tracker.warnings == []
    assert not (tmp_path / "run" / "wandb").exists()


def test_offline_run_mirrors_the_disk_in_silence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan, picture = tmp_path / "plan.json", tmp_path / "map.png"
    plan.write_text("{}")
    Image.new("RGB", (4, 4)).save(picture)
    with opened(tmp_path / "run", OFFLINE) as tracker:
        tracker.log({"fidelity/kl/agent": 0.1}, step=3)
        tracker.log({"fidelity/kl/agent": 0.2}, step=1)  # an earlier step of our axis is a point like any other
        tracker.table("layers", ["layer", "kept"], [["a", 16], ["b", None]])
        tracker.image("map", picture)
        tracker.artifact("plan of hope/25%", "plan", [plan], {"statistics_key": "abc"})
    assert tracker.warnings == []
    output = capfd.readouterr()
    assert (output.out, output.err) == ("", "")
    (log,) = offline_logs(tmp_path / "run")
    run = run_of(log)
    assert (run.project, run.run_group, run.display_name, run.job_type) == ("tests", "grid", "hope-p50", "run")
    assert list(run.tags) == ["x", "y"]
    assert run.run_id == read_records(tmp_path / "run" / "metrics.jsonl")[1]["id"]
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert {key: config[key] for key in CONFIG} == CONFIG
    rows = history(log)
    assert [(row["step"], row["fidelity/kl/agent"]) for row in rows[:2]] == [(3, 0.1), (1, 0.2)]
    assert len(rows) == 4
    metric = [record.metric for record in wandb_records(log) if record.WhichOneof("record_type") == "metric"]
    assert any(m.glob_name == "*" and m.step_metric == "step" for m in metric)
    assert summary(log)["fidelity/kl/agent"] == 0.2
    artifacts = [r.artifact for r in wandb_records(log) if r.WhichOneof("record_type") == "artifact"]
    (artifact,) = [a for a in artifacts if a.type == "plan"]
    assert artifact.name == "plan-of-hope-25-"
    assert json.loads(artifact.metadata) == {"statistics_key": "abc"}
    uploaded = [
        file.path for r in wandb_records(log) if r.WhichOneof("record_type") == "files" for file in r.files.files
    ]
    assert all(path.startswith("media/") for path in uploaded)  # no code, no diff, no requirements


def test_resume_keeps_the_id_and_every_point(tmp_path: Path) -> None:
    for part in range(2):
        with opened(tmp_path, OFFLINE) as tracker:
            for step in range(50 * part, 50 * part + 50):
                tracker.log({"loss": float(step)}, step=step)
        if part == 0:
            with (tmp_path / "metrics.jsonl").open("a") as file:
                file.write('{"kind": "metrics", "met')  # a kill while writing
    records = read_records(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records if record["kind"] == "metrics"] == list(range(100))
    starts = [record for record in records if record["kind"] == "start"]
    assert [start["resumed"] for start in starts] == [False, True]
    ids = [(record["mode"], record["id"]) for record in records if record["kind"] == "wandb"]
    first, second = sorted(offline_logs(tmp_path), key=lambda path: path.stat().st_mtime)
    assert ids == [("offline", run_of(first).run_id)] * 2
    assert run_of(second).run_id == run_of(first).run_id
    internal = [row["_step"] for log in (first, second) for row in history(log)]
    assert internal == sorted(set(internal))  # what W&B would drop after a resume, it would drop here
    assert len(internal) == 100


PARALLEL = """
import sys, time
from pathlib import Path
from moeprune.config.schema import TrackingOptions
from moeprune.run.tracking import open_tracker
name, killed = sys.argv[2], sys.argv[3] == "killed"
options = TrackingOptions(wandb="offline", group="grid")
tracker = open_tracker(options, run_dir=Path(sys.argv[1]) / name, name=name, config={"name": name}, job_type="run")
tracker.log({"kl": float(name)}, step=0)
print("logged", flush=True)
if killed:
    time.sleep(600)
tracker.finish()
"""


@pytest.mark.slow
def test_eight_parallel_offline_runs_keep_config_and_summary(tmp_path: Path) -> None:
    processes = {}
    for number in range(8):
        fate = "killed" if number < 2 else "finishes"
        command = [sys.executable, "-c", PARALLEL, str(tmp_path), str(number), fate]
        processes[number] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for number, process in processes.items():
        assert process.stdout is not None
        if number < 2:
            assert process.stdout.readline() == "logged\n"
            process.kill()
            process.communicate()
            continue
        out, err = process.communicate(timeout=300)
        assert (out, err, process.returncode) == ("logged\n", "", 0)
    for number in range(8):
        start, _, metrics = read_records(tmp_path / str(number) / "metrics.jsonl")
        assert start["config"] == {"name": str(number)}
        assert metrics["metrics"] == {"kl": float(number)}
        if number >= 2:
            (log,) = offline_logs(tmp_path / str(number))
            config = {item.key: json.loads(item.value_json) for item in run_of(log).config.update}
            assert config["name"] == str(number)
            assert summary(log)["kl"] == float(number)


def test_online_without_a_key_goes_offline_and_says_so_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with opened(tmp_path, TrackingOptions(wandb="online")) as tracker:
        tracker.log({"kl": 1.0})
    (warning,) = tracker.warnings
    assert "no API key" in warning
    assert "wandb sync" in warning
    assert "wandb:" not in capfd.readouterr().err
    (log,) = offline_logs(tmp_path)
    assert summary(log)["kl"] == 1.0


def test_unreachable_server_goes_offline_in_bounded_time(tmp_path: Path) -> None:
    script = """
import sys, time
from pathlib import Path
from moeprune.config.schema import TrackingOptions
from moeprune.run.tracking import open_tracker
for name in "ab":
    started = time.monotonic()
    options = TrackingOptions(wandb="online")
    with open_tracker(options, run_dir=Path(sys.argv[1]) / name, name=name, config={}, job_type="run") as tracker:
        tracker.log({"kl": 1.0})
    print(len(tracker.warnings), time.monotonic() - started)
"""
    with socket.socket() as silent:  # accepts and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        server = {"WANDB_BASE_URL": f"http://127.0.0.1:{silent.getsockname()[1]}", "WANDB_API_KEY": "0" * 40}
        environment = {**os.environ, **server, "WANDB_HTTP_TIMEOUT": "3"}
        command = [sys.executable, "-c", script, str(tmp_path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    (warnings, first), (again, second) = [line.split() for line in done.stdout.splitlines()]
    assert (warnings, again) == ("1", "1")
    assert float(first) < 30
    assert float(second) < 2  # the next run of a grid does not wait again
    assert done.stderr.count("recording offline instead") == 2
    assert len(done.stderr.splitlines()) == 2
    for name in "ab":
        (log,) = offline_logs(tmp_path / name)
        assert summary(log)["kl"] == 1.0


def test_no_wandb_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "__init__.py").write_text("raise ImportError('no wandb here')\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", PARALLEL, str(tmp_path), "1", "finishes"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "no wandb here" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert [record["kind"] for record in read_records(tmp_path / "1" / "metrics.jsonl")] == ["start", "metrics"]


def test_a_dying_wandb_service_costs_records_of_the_mirror_only(tmp_path: Path) -> None:
    script = """
import os, signal, subprocess, sys
from pathlib import Path
from moeprune.config.schema import TrackingOptions
from moeprune.run.tracking import open_tracker
tracker = open_tracker(TrackingOptions(), run_dir=Path(sys.argv[1]), name="n", config={}, job_type="run")
children = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "pid=,comm="], capture_output=True, text=True)
for line in children.stdout.splitlines():
    pid, name = line.split(None, 1)
    if name.startswith(("wandb", "gpu_stats")):
        os.kill(int(pid), signal.SIGKILL)
        print("killed", flush=True)
import time; time.sleep(1)
for step in range(20):
    tracker.log({"loss": float(step)}, step=step)
tracker.table("t", ["a"], [[1]])
tracker.finish()
print(len(tracker.warnings))
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "killed" in done.stdout
    assert int(done.stdout.split()[-1]) >= 1
    records = read_records(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records if record["kind"] == "metrics"] == list(range(20))


def test_the_environment_can_only_lower_the_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    opened(tmp_path / "off", OFFLINE).finish()
    assert offline_logs(tmp_path / "off") == []
    monkeypatch.setenv("WANDB_MODE", "online")
    opened(tmp_path / "still-off", DISABLED).finish()
    assert offline_logs(tmp_path / "still-off") == []


def test_a_failed_run_is_marked_and_interrupts_pass(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), opened(tmp_path, OFFLINE):
        raise KeyboardInterrupt
    (log,) = offline_logs(tmp_path)
    assert exits(log) == [1]


def test_options_refuse_unknown_keys_and_modes() -> None:
    with pytest.raises(ValidationError):
        TrackingOptions(wandb="on")  # type: ignore[arg-type]
    with pytest.raises(ValidationError):
        TrackingOptions(projekt="x")  # type: ignore[call-arg]
    assert TrackingOptions.model_validate({"tags": ["a"]}).tags == ("a",)
