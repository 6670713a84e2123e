"""run.json: which stages of a run are done, under which keys, what they left, and the software that did it.

    {"format": "moeprune.run/1", "name": ..., "created": ..., "versions": {...}, "commit": ...,
     "stages": {"record": {"key": "a81d5502c9ee", "seconds": 1.2, "warnings": [], ...}, ...},
     "outdated": {...}, "warnings": [...]}

A stage is done if and only if its entry stands under `stages`. `outdated` holds entries of stages whose inputs changed
since: they count again when the inputs turn out to be the same.
"""

import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import read_json, write_json

NAME = "run.json"
FORMAT = "moeprune.run/1"
STAGES = ("record", "select", "prune", "dense", "evaluate", "report")  # dense: only of runs that have `dense:`
# Sections of a config that decide results: not tracking, not runtime.
IDENTITY = ("model", "calibration", "selection", "refine", "checkpoint", "dense", "evaluation")
PACKAGES = ("moeprune", "torch", "transformers", "numpy", "scipy", "cvxpy", "osqp", "scs", "safetensors")

Entry = dict[str, Any]


class RunFile(BaseModel):
    """The content of a run.json. Fields of another release are kept; `outdated` is missing in old files."""

    model_config = ConfigDict(extra="allow")

    format: str = FORMAT
    name: str = "-"
    created: str = "-"
    versions: dict[str, str] = Field(default_factory=dict)
    commit: str | None = None
    stages: dict[str, Entry] = Field(default_factory=dict)
    outdated: dict[str, Entry] = Field(default_factory=dict)
    warnings: list[str] = Field(default_factory=list)

    @classmethod
    def new(cls, name: str) -> "RunFile":
        created = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        return cls(name=name, created=created, versions=versions(PACKAGES), commit=commit())

    @classmethod
    def load(cls, directory: Path) -> "RunFile":
        """The run.json in `directory`. Raises InputError when it is missing or damaged."""
        path = directory / NAME
        try:
            return cls.model_validate(read_json(path))
        except ValidationError as error:
            raise InputError(f"{path}: not the record of a run ({error.errors()[0]['msg']})") from error

    def save(self, directory: Path) -> None:
        """Write run.json; `warnings` are those of the stages that are done, each once, in the order of the stages."""
        collected = [text for name in STAGES for text in self.stages.get(name, {}).get("warnings", [])]
        self.warnings = list(dict.fromkeys(collected))
        write_json(directory / NAME, self.model_dump())

    def recall(self, stage: str, key: str) -> bool:
        """Make an outdated entry under this key valid again; whether there was one."""
        if self.outdated.get(stage, {}).get("key") != key:
            return False
        self.stages[stage] = self.outdated.pop(stage)
        return True

    def begin(self, stage: str) -> bool:
        """The stage's files may change from here on: drop its entry, outdate those after it; whether any was there."""
        later = [name for name in STAGES[STAGES.index(stage) + 1 :] if name in self.stages]
        known = stage in self.stages or stage in self.outdated or bool(later)
        self.outdated |= {name: self.stages.pop(name) for name in later}
        self._drop(stage)
        return known

    def finish(self, stage: str, entry: Mapping[str, Any]) -> None:
        """Mark the stage done, by the software of this process."""
        self.stages[stage] = dict(entry)
        self.versions, self.commit = versions(PACKAGES), commit()

    def forget(self, stage: str) -> None:
        """Drop the stage and all after it, so that they run again."""
        for name in STAGES[STAGES.index(stage) :]:
            self._drop(name)

    def _drop(self, stage: str) -> None:
        self.stages.pop(stage, None)
        self.outdated.pop(stage, None)


def done_stages(directory: Path) -> set[str]:
    """The stages that are done in this directory; none where there is no run."""
    return set(RunFile.load(directory).stages) if (directory / NAME).is_file() else set()


def keyed(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A config list's items by their names; by their numbers where two have one name."""
    names = [str(item.get("name", number)) for number, item in enumerate(items)]
    unique = len(set(names)) == len(names)
    return {name if unique else str(number): item for number, (name, item) in enumerate(zip(names, items))}


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Package -> version, of Python and of those packages that are installed."""
    installed = {"python": platform.python_version()}
    for package in packages:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return installed


def commit() -> str | None:
    """The commit of the source tree the package runs from, with `+` when it has changes; None outside a git tree."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}

    def git(*words: str) -> str:
        call = subprocess.run(["git", "-C", root, *words], capture_output=True, text=True, env=environment, check=False)
        return call.stdout.strip()

    head = git("rev-parse", "HEAD")
    return (head + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")) or None
