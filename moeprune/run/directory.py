"""Run directories: what is done, under which key, and how a killed run goes on.

A stage is done if and only if its entry stands in run.json; the entry is written last, after the stage's files were
written beside and renamed. A key is a digest of everything that affects the stage's result and of nothing else. When a
stage begins, its entry goes and those after it are outdated: nobody reads what they left, until they run again or turn
out to have the same key after all.
"""

import fcntl
import hashlib
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import read_json, write_json, write_text
from moeprune.config.load import dump_yaml, load_run
from moeprune.config.schema import RunConfig
from moeprune.run.tracking import Tracker, open_tracker

FORMAT = "moeprune.run/1"
STAGES = ("record", "select", "prune", "dense", "evaluate", "report")  # dense: only of runs that have `dense:`
# Raised when a change of code changes a stage's numbers, so that old results are not reused under a new meaning.
STAGE_VERSIONS = {"record": 1, "select": 1, "prune": 1, "dense": 2, "evaluate": 1, "report": 1}
# Sections that decide results: not tracking, not runtime.
IDENTITY = ("model", "calibration", "selection", "refine", "checkpoint", "dense", "evaluation")


def stage_key(stage: str, *inputs: Any) -> str:
    """12 hex digits from the stage, its version and its inputs (config sections, keys of earlier stages)."""
    text = json.dumps([stage, STAGE_VERSIONS[stage], *inputs], sort_keys=True, default=_jsonable)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _jsonable(value: Any) -> Any:
    return value.model_dump(mode="json")


class Run:
    """One run directory and its run.json."""

    def __init__(self, directory: Path, config: RunConfig) -> None:
        self.directory, self.config = directory, config
        self.path = directory / "run.json"
        self.record: dict[str, Any] = {
            "format": FORMAT,
            "name": directory.name,
            "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "versions": versions(),
            "commit": commit(),
            "stages": {},
            "outdated": {},  # entries of stages that were made from earlier inputs
            "warnings": [],
        }

    @classmethod
    def open(cls, directory: Path, config: RunConfig) -> "Run":
        """The run in `directory`, new or resumed. Raises InputError where `require_place` does."""
        run = cls(directory, config)
        require_place(directory, config)
        directory.mkdir(parents=True, exist_ok=True)
        write_text(directory / "config.yaml", dump_yaml(config))
        run.reread()
        return run

    def reread(self) -> None:
        """Take run.json as it is now: another process may have finished stages since."""
        if self.path.is_file():
            self.record = {"outdated": {}, **read_json(self.path)}

    @cached_property
    def tracker(self) -> Tracker:
        """Opened by the first stage that has work to do: a run that only reuses leaves no trace in W&B."""
        config = self.config.model_dump(mode="json")
        return open_tracker(
            self.config.tracking, run_dir=self.directory, name=self.directory.name, config=config, job_type="run"
        )

    def close(self, exit_code: int) -> None:
        if "tracker" in self.__dict__:
            self.tracker.finish(exit_code)

    def recall(self, stage: str, key: str) -> dict[str, Any] | None:
        """What the finished stage left, or None when it has not finished under this key.

        An outdated entry under this key holds again: its inputs turned out to be the same.
        """
        done, outdated = self.record["stages"], self.record["outdated"]
        if outdated.get(stage, {}).get("key") == key:
            done[stage] = outdated.pop(stage)
            self._write()
        entry = done.get(stage)
        return entry if entry and entry["key"] == key else None

    def begin(self, stage: str) -> None:
        """From here on the stage's files may change: it is not done, and what was made of them is outdated."""
        done, outdated = self.record["stages"], self.record["outdated"]
        later = [name for name in STAGES[STAGES.index(stage) + 1 :] if name in done]
        known = stage in done or stage in outdated or later
        outdated |= {name: done.pop(name) for name in later}
        for entries in (done, outdated):
            entries.pop(stage, None)
        if known:
            self._write()

    def finish(self, stage: str, entry: Mapping[str, Any], warnings: list[str]) -> None:
        """Mark the stage done."""
        self.record["stages"][stage] = dict(entry) | {"warnings": warnings}
        self.record["versions"], self.record["commit"] = versions(), commit()
        self._write()

    def _write(self) -> None:
        collected = [w for name in STAGES for w in self.record["stages"].get(name, {}).get("warnings", [])]
        self.record["warnings"] = list(dict.fromkeys(collected))
        write_json(self.path, self.record)

    def forget(self, stage: str) -> None:
        """Forget the stage and all after it, so that they run again."""
        for name in STAGES[STAGES.index(stage) :]:
            for entries in (self.record["stages"], self.record["outdated"]):
                entries.pop(name, None)
        self._write()


def require_place(directory: Path, config: RunConfig) -> None:
    """Raises InputError when the directory holds something else, or a run of another config, with what differs."""
    written = directory / "config.yaml"
    if written.is_file():
        differing = differences(load_run(written), config)
        if differing:
            raise InputError(
                f"{directory} holds a run of another config; differing: {'; '.join(differing)}. Give another "
                "--output, or remove the directory"
            )
    elif directory.is_dir() and any(not path.name.startswith(".") for path in directory.iterdir()):
        raise InputError(f"{directory} is not empty and holds no run; give another --output")


def keyed(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A list's items by their names; by their numbers where two have one name."""
    names = [str(item.get("name", number)) for number, item in enumerate(items)]
    apart = len(set(names)) == len(names)
    return {name if apart else str(number): item for number, (name, item) in enumerate(zip(names, items))}


def differences(old: RunConfig, new: RunConfig) -> list[str]:
    """`key: old -> new` for every field that decides a result."""

    def flat(value: Any, prefix: str) -> dict[str, Any]:
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            value = keyed(value)
            value["(order)"] = list(value)
        if isinstance(value, dict) and value:
            return {
                k: v
                for key, child in value.items()
                for k, v in flat(child, f"{prefix}.{key}" if prefix else key).items()
            }
        return {prefix: value}

    a, b = (flat(config.model_dump(mode="json", include=set(IDENTITY)), "") for config in (old, new))
    return [f"{key}: {a.get(key)} -> {b.get(key)}" for key in sorted({*a, *b}) if a.get(key) != b.get(key)]


def finished(directory: Path) -> set[str]:
    """The stages that are done in this directory; none where there is no run."""
    path = directory / "run.json"
    return set(read_json(path).get("stages", {})) if path.is_file() else set()


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Inside, no other process works in this directory; a second one waits. A dead process holds no lock."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def versions() -> dict[str, str]:
    """Versions of what decides a result."""
    packages = ("moeprune", "torch", "transformers", "numpy", "scipy", "cvxpy", "osqp", "scs", "safetensors")
    return {"python": platform.python_version()} | {name: metadata.version(name) for name in packages}


def commit() -> str | None:
    """The commit of the source tree the package runs from, with `+` when it has changes; None outside a git tree."""
    here = Path(__file__).resolve().parents[2]
    if not (here / ".git").exists():
        return None
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", here, *words], capture_output=True, text=True, env=environment, check=False)
        return done.stdout.strip()

    head = git("rev-parse", "HEAD")
    return (head + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")) or None
