"""The mirror of a run at Weights & Biases, and the guard that keeps its troubles away from the run.

Tracking: every record of a run as a line of metrics.jsonl, mirrored to Weights & Biases when it can be.

The disk is the truth, W&B its mirror. Nothing W&B does can stop a run or change a number: what it refuses is said
once, counted, kept in `Tracker.warnings`, and is in metrics.jsonl all the same. Checkpoints are never uploaded.
"""

import json
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol

from pydantic import BaseModel

from moeprune.config.schema import TrackingOptions

Mode = Literal["online", "offline", "disabled"]
RECORDS = "metrics.jsonl"
INIT_SECONDS = 20.0  # wait for an unreachable server before going offline
RETRY_SECONDS = 600.0  # a grid without a network waits for the server once, not once a run
FINISH_SECONDS = 60.0  # wait for the last upload; what is left can be sent later with `wandb sync`
PATIENCE = 3  # failures in a row after which W&B is left alone

logger = logging.getLogger("moeprune.tracking")
_last_problem: dict[str, tuple[float, str]] = {}  # "login" -> (when, why): the state of this machine's network


class Mirror(Protocol):
    """Where records go besides metrics.jsonl. `number` counts the records of the run over all its processes."""

    identity: dict[str, str]  # {"mode", "id"} of the W&B run, or nothing

    def log(self, metrics: Mapping[str, Any], step: int | None, number: int) -> None: ...
    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], number: int) -> None: ...
    def image(self, name: str, path: Path, number: int) -> None: ...
    def artifact(self, name: str, kind: str, paths: Sequence[Path], metadata: Mapping[str, Any]) -> None: ...
    def finish(self, exit_code: int) -> None: ...


class NoMirror:
    """The mirror of a run that nobody watches: the same methods, doing nothing."""

    def __init__(self) -> None:
        self.identity: dict[str, str] = {}

    def log(self, metrics: Mapping[str, Any], step: int | None, number: int) -> None: ...
    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], number: int) -> None: ...
    def image(self, name: str, path: Path, number: int) -> None: ...
    def artifact(self, name: str, kind: str, paths: Sequence[Path], metadata: Mapping[str, Any]) -> None: ...
    def finish(self, exit_code: int) -> None: ...


class WandbMirror:
    """One W&B run. Raises whatever W&B raises; `Tracker` decides what that means."""

    def __init__(self, run: Any, mode: Mode) -> None:
        self._run = run
        self.identity = {"mode": mode, "id": run.id}
        # Our own axis: W&B's internal step only ever grows and drops points that come back after a resume.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")

    def _log(self, values: dict[str, Any], number: int) -> None:
        self._run.log(values, step=max(number, self._run.step))

    def log(self, metrics: Mapping[str, Any], step: int | None, number: int) -> None:
        self._log({**metrics} if step is None else {**metrics, "step": step}, number)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], number: int) -> None:
        import wandb

        data = [[plain(cell) for cell in row] for row in rows]
        self._log({name: wandb.Table(columns=list(columns), data=data, allow_mixed_types=True)}, number)

    def image(self, name: str, path: Path, number: int) -> None:
        import wandb

        self._log({name: wandb.Image(str(path))}, number)

    def artifact(self, name: str, kind: str, paths: Sequence[Path], metadata: Mapping[str, Any]) -> None:
        import wandb

        artifact = wandb.Artifact(re.sub(r"[^\w.-]", "-", name)[:128], type=kind, metadata=plain(dict(metadata)))
        for path in paths:
            # immutable: W&B reads the file where it is; a mutable one is copied into its staging folder first
            artifact.add_file(str(path), policy="immutable", skip_cache=True)
        self._run.log_artifact(artifact)

    def finish(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


def connect(guard: "Guard", mode: Mode, about: Mapping[str, Any]) -> Mirror:
    """A W&B run in this mode; offline when online fails; nothing when offline fails too. Waits seconds, not minutes."""
    if mode == "online":
        later = f"recording offline instead; upload later with `wandb sync {guard.folder}/offline-run-*`"
        problem = _login_problem(guard)
        if not problem:
            with guard.calling("start online", remedy=later):
                return _start("online", about)
            about = {**about, "id": secrets.token_hex(4)}  # W&B holds on to the id of a start that failed
        else:
            guard.say(f"W&B: {problem}; {later}")
    with guard.calling("start", remedy=f"records go to {RECORDS} alone"):
        return _start("offline", about)
    return NoMirror()


def _login_problem(guard: "Guard") -> str:
    """Why this process cannot reach W&B now, or an empty string. An unreachable server is asked once in ten minutes."""
    asked, problem = _last_problem.get("login", (-math.inf, ""))
    if time.monotonic() - asked < RETRY_SECONDS:
        return problem
    with guard.calling("log in", on_error=lambda reason: _last_problem.update(login=(time.monotonic(), reason))):
        import wandb

        # never prompts: a run without a terminal would wait for ever, one with a terminal is not being watched
        if wandb.login(prompt=False, verify=True):
            return ""
        return "no API key (run `wandb login` once, or set WANDB_API_KEY)"
    return _last_problem["login"][1]


def _start(mode: Mode, about: Mapping[str, Any]) -> Mirror:
    import wandb

    wanted: dict[str, Any] = {
        "silent": True,
        "console": "off",
        "disable_git": True,
        "disable_code": True,
        "save_code": False,
        "disable_job_creation": True,
        "symlink": False,
        "use_dot_wandb": False,
        "init_timeout": INIT_SECONDS,
        "finish_timeout": FINISH_SECONDS,
        "x_save_requirements": False,
        "x_disable_stats": True,
    }
    known = {name: value for name, value in wanted.items() if name in wandb.Settings.model_fields}
    settings = wandb.Settings(**known)
    run = wandb.init(mode=mode, settings=settings, reinit="create_new", resume="allow", **about)
    return WandbMirror(run, mode)


class Guard:
    """A context for calls into W&B: it swallows their errors, counts them, and keeps W&B's files in the run directory.

    The one place that swallows every Exception: W&B raises its own, protobuf's, socket's, OS and plain Python errors,
    and none of them is a reason to lose hours of recording. Interrupts and exits pass.
    """

    def __init__(self, run_dir: Path) -> None:
        self.folder = Path(run_dir).resolve() / "wandb"
        self.warnings: list[str] = []
        self.missed = 0  # records that are in metrics.jsonl and not at W&B
        self._failures_in_a_row = 0
        self._on_error: Callable[[str], None] = self._miss
        self._environment: dict[str, str | None] = {}

    @property
    def gave_up(self) -> bool:
        return self._failures_in_a_row >= PATIENCE

    def say(self, message: str) -> None:
        """Warn, unless the same was said before."""
        if message not in self.warnings:
            self.warnings.append(message)
            logger.warning(message)

    def calling(self, what: str, *, remedy: str = "", on_error: Callable[[str], None] | None = None) -> "Guard":
        """This guard, told what is tried. An error counts as a missed record unless it has a remedy or a handler."""

        def told(reason: str) -> None:
            self.say(f"W&B could not {what} ({reason}); {remedy}")

        self._on_error = on_error or (told if remedy else self._miss)
        return self

    def _miss(self, reason: str) -> None:
        self.missed += 1
        self._failures_in_a_row += 1
        if self.missed == 1:
            self.say(f"W&B refused a record ({reason}); the run goes on and {RECORDS} is complete")

    def __enter__(self) -> "Guard":
        folders = {
            "WANDB_DIR": self.folder.parent,
            "WANDB_DATA_DIR": self.folder,
            "WANDB_CACHE_DIR": self.folder / "cache",
        }
        wanted = {"WANDB_SILENT": "true", **{name: str(path) for name, path in folders.items()}}
        self._environment = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        for name, value in self._environment.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})
        if error is None:
            self._failures_in_a_row = 0
            return False
        if not isinstance(error, Exception):
            return False
        reason = " ".join(str(error).split())[:300]
        self._on_error(f"{type(error).__name__}: {reason}" if reason else type(error).__name__)
        return True


def plain(value: Any) -> Any:
    """The value in JSON's own types; arrays become lists, numbers that are not finite become words."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, BaseModel):
        return plain(value.model_dump(mode="json"))
    if hasattr(value, "tolist"):  # numpy and torch, scalars too
        return plain(value.tolist())
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


MODES: tuple[Mode, ...] = ("online", "offline", "disabled")  # from most to least that leaves this machine


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
