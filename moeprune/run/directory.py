"""Run directories: what is done, under which key, and how a killed run goes on.

A stage's entry in run.json is written last, after the stage's files were written beside and renamed. A key is a digest
of everything that affects the stage's result and of nothing else. When a stage begins, its entry is dropped and those
after it are outdated: nobody reads the files they left, until they run again or have the same key after all.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from filelock import FileLock

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import write_text
from moeprune.artifacts.run import IDENTITY, NAME, Entry, RunFile, keyed
from moeprune.config.load import dump_yaml, load_run
from moeprune.config.schema import RunConfig
from moeprune.run.tracking import Tracker, open_tracker

# Raised when a change of code changes a stage's numbers, so that old results are not reused under a new meaning.
STAGE_VERSIONS = {"record": 1, "select": 1, "prune": 1, "dense": 2, "evaluate": 1, "report": 1}


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
        self.record = RunFile.new(directory.name)

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
        if (self.directory / NAME).is_file():
            self.record = RunFile.load(self.directory)

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

    def recall(self, stage: str, key: str) -> Entry | None:
        """What the finished stage left, or None when it has not finished under this key."""
        if self.record.recall(stage, key):
            self.record.save(self.directory)
        entry = self.record.stages.get(stage)
        return entry if entry and entry["key"] == key else None

    def begin(self, stage: str) -> None:
        """From here on the stage's files may change: it is not done, and results made from them are outdated."""
        if self.record.begin(stage):
            self.record.save(self.directory)

    def finish(self, stage: str, entry: Mapping[str, Any], warnings: list[str]) -> None:
        """Mark the stage done."""
        self.record.finish(stage, {**entry, "warnings": warnings})
        self.record.save(self.directory)

    def forget(self, stage: str) -> None:
        """Forget the stage and all after it, so that they run again."""
        self.record.forget(stage)
        self.record.save(self.directory)


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


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Inside, no other process works in this directory; a second one waits. A dead process holds no lock."""
    directory.mkdir(parents=True, exist_ok=True)
    # A soft lock, which filelock takes where a file system has no flock, would outlive its process.
    with FileLock(directory / ".lock", fallback_to_soft=False, preserve_lock_file=True):
        yield
