"""Groups of runs over processes and over Ray: the same results, and a death takes down no more than its own group."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import write_json
from moeprune.config.schema import RunConfig
from moeprune.run.grid import run_grid
from moeprune.run.workers import Errors, Group, over_processes, over_ray, require_ray
from tests.run.small_grid import results, write_grid

pytestmark = pytest.mark.usefixtures("plain_figures")
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is an extra: moeprune[ray]")
ON_THIS_MACHINE = RunConfig.model_validate({"runtime": {"device": "cpu"}})
GROUPS = [{"fine-0": ON_THIS_MACHINE}, {"done": ON_THIS_MACHINE, "dies": ON_THIS_MACHINE}, {"fine-1": ON_THIS_MACHINE}]


def work(group: Group, directory: Path, shared: Path) -> Errors:
    """Leaves run.json of every run, and kills its own process at the one that is called `dies`."""
    for name in group:
        if name == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        write_json(directory / name / "run.json", {"stages": {"report": {}}, "where": os.getcwd()})
    return {name: "as told" for name in group if name == "fine-1"}


def outcome(ended):
    return {name: errors.get(name) for group, errors in ended for name in group}


def test_a_process_that_dies_takes_down_its_own_unfinished_runs(tmp_path):
    errors = outcome(over_processes(GROUPS, work, tmp_path, tmp_path, workers=2))
    assert "process died" in errors.pop("dies")
    assert errors == {"fine-0": None, "done": None, "fine-1": "as told"}


SLEEPY = """
import sys, time
from pathlib import Path
from tests.run import test_workers as t

def work(group, directory, shared):
    import os
    (directory / "pid").write_text(str(os.getpid()))
    time.sleep(600)

if __name__ == "__main__":
    from moeprune.run.workers import over_processes
    list(over_processes(t.GROUPS[:1], work, Path(sys.argv[1]), Path(sys.argv[1]), workers=2))
"""


def test_processes_end_with_the_one_that_started_them(tmp_path):
    script = tmp_path / "sleepy.py"
    script.write_text(SLEEPY)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    parent = subprocess.Popen([sys.executable, script, tmp_path], env=environment)
    pid = tmp_path / "pid"
    assert _within(120, lambda: pid.is_file() and pid.read_text())
    parent.kill()
    parent.wait()
    assert _within(30, lambda: not _alive(int(pid.read_text())))


def _within(seconds, condition):
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return met


def _alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and that nobody has asked for its exit code does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return not state.stdout.startswith("Z") and bool(state.stdout.strip())


@pytest.mark.parametrize(
    ("options", "message"),
    [({"ray": "local", "workers": 2}, "give one of them"), ({"workers": 0}, "at least 1"), ({"ray": "local"}, "ray]")],
)
def test_bad_places_to_run_are_refused_first(tmp_path, monkeypatch, options, message):
    monkeypatch.setitem(sys.modules, "ray", None)  # as where Ray is not installed
    with pytest.raises(InputError, match=message):
        run_grid(tmp_path / "grid.yaml", [], output=tmp_path / "out", **options)


@needs_ray
@pytest.mark.slow
def test_ray_gives_what_one_process_gives(finished_grid, tmp_path, monkeypatch):
    write_grid(tmp_path)
    monkeypatch.chdir(tmp_path)
    spread = run_grid(Path("grid.yaml"), [], output=Path("spread"), ray="local")
    assert spread.done == finished_grid.outcome.done
    assert not spread.failed
    assert results(spread.directory) == results(finished_grid.outcome.directory)


@needs_ray
def test_ray_records_a_task_that_dies(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    errors = outcome(over_ray(GROUPS, work, Path("runs"), Path("shared"), address="local"))
    assert "its Ray task failed" in errors.pop("dies")
    assert errors == {"fine-0": None, "done": None, "fine-1": "as told"}


@needs_ray
@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nothing_listens_is_refused_at_once(scheme):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"{scheme}127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(InputError, match="no Ray cluster answers"):
        require_ray(address)


@needs_ray
def test_an_address_that_is_none(tmp_path):
    with pytest.raises(InputError, match="no Ray cluster answers"):
        list(over_ray(GROUPS, work, tmp_path, tmp_path, address="nowhere"))
