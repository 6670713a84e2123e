"""Tracking: every record of a run as a line of metrics.jsonl, mirrored to Weights & Biases when it can be.

The disk is the truth, W&B its mirror. Nothing W&B does can stop a run or change a number: what it refuses is said
once, counted, kept in `Tracker.warnings`, and is in metrics.jsonl all the same. Checkpoints are never uploaded.
"""

import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from moeprune.experiment.wandb_mirror import RECORDS, Guard, Mirror, Mode, NoMirror, connect, plain

MODES: tuple[Mode, ...] = ("online", "offline", "disabled")  # from most to least that leaves this machine


class TrackingOptions(BaseModel):
    """The config section `tracking`. It never enters a key: it changes no result."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    wandb: Mode = "offline"
    project: str = "moeprune"
    group: str | None = None  # a grid sets its own name
    tags: tuple[str, ...] = ()


class Tracker:
    """Writes each record to metrics.jsonl and hands it to the mirror. Usable as a context manager."""

    def __init__(self, records: Path, guard: Guard, *, number: int = 0) -> None:
        self._records = records
        self._guard = guard
        self._number = number  # records of this run so far, over all its processes
        self._mirror: Mirror = NoMirror()
        self._finished = False

    @property
    def warnings(self) -> list[str]:
        """What went wrong with W&B so far, each thing once."""
        return self._guard.warnings

    def log(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Record named numbers, optionally at a step of the run's own axis."""
        self._record("metrics", step=step, metrics=dict(metrics))
        self._reflect("metrics", lambda mirror: mirror.log(plain(metrics), step, self._number))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self._record("table", name=name, columns=list(columns), rows=[list(row) for row in rows])
        self._reflect(name, lambda mirror: mirror.table(name, columns, rows, self._number))

    def image(self, name: str, path: Path) -> None:
        self._record("image", name=name, path=self._relative(path))
        self._reflect(name, lambda mirror: mirror.image(name, path, self._number))

    def artifact(self, name: str, kind: str, paths: Sequence[Path], metadata: Mapping[str, Any] | None = None) -> None:
        """Record files under a kind ("plan", ...). Its inputs, named in the metadata, are the lineage."""
        metadata = dict(metadata or {})
        self._record("artifact", name=name, type=kind, paths=[self._relative(p) for p in paths], metadata=metadata)
        self._reflect(name, lambda mirror: mirror.artifact(name, kind, paths, metadata))

    def finish(self, exit_code: int = 0) -> None:
        """Close the mirror, waiting about a minute at most; a second call does nothing."""
        if self._finished:
            return
        self._finished = True
        with self._guard.calling("finish", remedy=f"{RECORDS} is complete"):
            self._mirror.finish(exit_code)
        if self._guard.missed:
            self._guard.say(
                f"W&B missed {self._guard.missed} of the records of this run; {RECORDS} has all {self._number}"
            )

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.finish(0 if kind is None else 1)

    def _reflect(self, what: str, call: Callable[[Mirror], None]) -> None:
        if self._guard.gave_up:
            self._guard.missed += 1
            return
        with self._guard.calling(what):
            call(self._mirror)

    def _relative(self, path: Path) -> str:
        """The path as seen from the run directory, so that the directory can be moved."""
        return os.path.relpath(path, self._records.parent)

    def _record(self, kind: str, **record: Any) -> None:
        line = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "kind": kind, **record}
        with self._records.open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain(line), ensure_ascii=False, allow_nan=False) + "\n")
        self._number += 1


def open_tracker(
    options: TrackingOptions, *, run_dir: Path, name: str, config: Mapping[str, Any], job_type: str
) -> Tracker:
    """A tracker for this run; a run that was tracked before continues under its W&B id.

    `config` is the resolved config. Online without a key or a
    reachable server becomes offline, with a warning that names the command to upload later.
    """
    run_dir = Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    records = run_dir / RECORDS
    earlier = read_records(records)
    _drop_half_line(records)
    run_id = _run_id(earlier)
    guard = Guard(run_dir)
    tracker = Tracker(records, guard, number=len(earlier))
    mode = _allowed(options.wandb)
    tracker._record("start", name=name, job_type=job_type, resumed=bool(earlier), config=dict(config))
    if mode != "disabled":
        about = {"project": options.project, "group": options.group, "tags": list(options.tags)}
        about |= {"id": run_id, "name": name, "job_type": job_type, "config": plain(dict(config)), "dir": str(run_dir)}
        tracker._mirror = connect(guard, mode, about)
        if tracker._mirror.identity:
            tracker._record("wandb", **tracker._mirror.identity)
    return tracker


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, in order; a last line cut off by a kill is left out."""
    if not path.is_file():
        return []
    whole, _, _ = path.read_text(encoding="utf-8", errors="replace").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines() if line.strip()]


def _drop_half_line(path: Path) -> None:
    """Cut what a killed process left after the last newline."""
    if path.is_file():
        data = path.read_bytes()
        if data and not data.endswith(b"\n"):
            os.truncate(path, data.rfind(b"\n") + 1)


def _run_id(earlier: Sequence[Mapping[str, Any]]) -> str:
    """The id of the run's first W&B process; a sweep agent's own id wins, else a new one."""
    if os.environ.get("WANDB_SWEEP_ID") and os.environ.get("WANDB_RUN_ID"):
        return os.environ["WANDB_RUN_ID"]
    known = [str(record["id"]) for record in earlier if record["kind"] == "wandb"]
    return known[-1] if known else secrets.token_hex(4)


def _allowed(wanted: Mode) -> Mode:
    """The wanted mode, lowered to the one WANDB_MODE asks for: the environment may keep data here, never send it."""
    asked = os.environ.get("WANDB_MODE", "")
    asked = {"dryrun": "offline"}.get(asked, asked)
    return MODES[max(MODES.index(wanted), MODES.index(asked))] if asked in MODES else wanted
