"""Every record of a run as a line of metrics.jsonl, mirrored to Weights & Biases when it can be.

The disk is the truth, W&B its mirror. Nothing W&B does can stop a run or change a number: what it refuses is warned of
once, counted, kept in `Tracker.warnings`, and is in metrics.jsonl all the same. Checkpoints are never uploaded.
"""

import json
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from moeprune.config.schema import TrackingOptions

Mode = Literal["online", "offline", "disabled"]
MODES: tuple[Mode, ...] = ("online", "offline", "disabled")  # from most to least that leaves this machine
RECORDS = "metrics.jsonl"
RETRY_SECONDS = 600.0  # a grid without a network waits for the server once, not once a run
PATIENCE = 3  # failures in a row after which W&B is left alone
SETTINGS: dict[str, Any] = {
    "silent": True,
    "console": "off",
    "disable_git": True,
    "disable_code": True,
    "save_code": False,
    "disable_job_creation": True,
    "symlink": False,
    "use_dot_wandb": False,
    "init_timeout": 20.0,  # seconds; then offline
    "finish_timeout": 60.0,  # seconds; what is left can be sent later with `wandb sync`
    "x_save_requirements": False,
    "x_disable_stats": True,
}

logger = logging.getLogger("moeprune.tracking")
_login: dict[str, tuple[float, str]] = {}  # "problem" -> (when, why): the state of this machine's network


class Tracker:
    """Writes each record to metrics.jsonl and to the W&B run, where there is one. Usable as a context manager."""

    def __init__(self, run_dir: Path, *, records: int = 0) -> None:
        self.warnings: list[str] = []  # what went wrong with W&B so far, each thing once
        self._directory = Path(run_dir)
        self._folder = self._directory.resolve() / "wandb"
        self._records = records  # of this run so far, over all its processes
        self._run: Any = None  # the W&B run
        self._missed = 0  # records that are in metrics.jsonl and not at W&B
        self._failures = 0  # in a row
        self._finished = False

    def log(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Record named numbers, optionally at a step of the run's own axis."""
        self.write("metrics", step=step, metrics=dict(metrics))
        self._mirror(lambda wandb: plain(metrics) | ({} if step is None else {"step": step}))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.write("table", name=name, columns=list(columns), rows=[list(row) for row in rows])
        data = [[plain(cell) for cell in row] for row in rows]
        self._mirror(lambda wandb: {name: wandb.Table(columns=list(columns), data=data, allow_mixed_types=True)})

    def image(self, name: str, path: Path) -> None:
        self.write("image", name=name, path=os.path.relpath(path, self._directory))
        self._mirror(lambda wandb: {name: wandb.Image(str(path))})

    def artifact(self, name: str, kind: str, paths: Sequence[Path], metadata: Mapping[str, Any] | None = None) -> None:
        """Record files under a kind ("plan", ...). Its inputs, named in the metadata, are the lineage."""
        metadata = dict(metadata or {})
        relative = [os.path.relpath(path, self._directory) for path in paths]
        self.write("artifact", name=name, type=kind, paths=relative, metadata=metadata)

        def upload(wandb: Any) -> None:
            artifact = wandb.Artifact(re.sub(r"[^\w.-]", "-", name)[:128], type=kind, metadata=plain(metadata))
            for path in paths:
                # immutable: W&B reads the file where it is; a mutable one is copied into its staging folder first
                artifact.add_file(str(path), policy="immutable", skip_cache=True)
            self._run.log_artifact(artifact)

        self._mirror(upload)

    def finish(self, exit_code: int = 0) -> None:
        """Close the W&B run, waiting about a minute at most; a second call does nothing."""
        if self._finished:
            return
        self._finished = True
        if self._run is not None:
            with self._attempt("finish", remedy=f"{RECORDS} is complete"):
                self._run.finish(exit_code=exit_code)
        if self._missed:
            self._warn(f"W&B missed {self._missed} of the records of this run; {RECORDS} has all {self._records}")

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.finish(0 if kind is None else 1)

    def write(self, kind: str, **record: Any) -> None:
        """A line of metrics.jsonl, and of nothing else."""
        line = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "kind": kind, **record}
        with (self._directory / RECORDS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain(line), ensure_ascii=False, allow_nan=False) + "\n")
        self._records += 1

    def connect(self, mode: Mode, about: Mapping[str, Any]) -> None:
        """Start a W&B run: offline when online fails, none when offline fails too. Waits seconds, not minutes."""
        if mode == "online":
            remedy = f"recording offline instead; upload later with `wandb sync {self._folder}/offline-run-*`"
            problem = self._login_problem()
            if problem:
                self._warn(f"W&B: {problem}; {remedy}")
            else:
                with self._attempt("start online", remedy=remedy):
                    self._start("online", about)
                about = {**about, "id": secrets.token_hex(4)}  # W&B holds on to the id of a start that failed
        if self._run is None:
            with self._attempt("start", remedy=f"records go to {RECORDS} alone"):
                self._start("offline", about)

    def _start(self, mode: Mode, about: Mapping[str, Any]) -> None:
        import wandb

        settings = wandb.Settings(**{k: v for k, v in SETTINGS.items() if k in wandb.Settings.model_fields})
        run = wandb.init(mode=mode, settings=settings, reinit="create_new", resume="allow", **about)
        # Our own axis: W&B's internal step only ever grows and drops points that come back after a resume.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        self._run = run
        self.write("wandb", mode=mode, id=run.id)

    def _login_problem(self) -> str:
        """Why this process cannot reach W&B, or an empty string. A dead server is asked once in RETRY_SECONDS."""
        since, problem = _login.get("problem", (-math.inf, ""))
        if time.monotonic() - since < RETRY_SECONDS:
            return problem
        with self._guarded(lambda reason: _login.update(problem=(time.monotonic(), reason))):
            import wandb

            # never prompts: a run without a terminal would wait for ever, one with a terminal is not being watched
            if wandb.login(prompt=False, verify=True):
                return ""
            return "no API key (run `wandb login` once, or set WANDB_API_KEY)"
        return _login["problem"][1]

    def _mirror(self, values: Callable[[Any], dict[str, Any] | None]) -> None:
        """Log what `values(wandb)` returns, if anything, to the W&B run."""
        if self._run is None:
            return
        if self._failures >= PATIENCE:
            self._missed += 1
            return
        with self._attempt("take a record"):
            import wandb

            named = values(wandb)
            if named is not None:
                self._run.log(named, step=max(self._records, self._run.step))

    @contextmanager
    def _attempt(self, what: str, *, remedy: str = "") -> Iterator[None]:
        """An error of W&B inside is warned of, with its remedy; without one it counts as a missed record."""

        def failed(reason: str) -> None:
            if remedy:
                self._warn(f"W&B could not {what} ({reason}); {remedy}")
                return
            self._missed += 1
            self._failures += 1
            if self._missed == 1:
                self._warn(f"W&B refused a record ({reason}); the run goes on and {RECORDS} is complete")

        with self._guarded(failed):
            yield
            self._failures = 0

    @contextmanager
    def _guarded(self, failed: Callable[[str], None]) -> Iterator[None]:
        """Inside, W&B's files stay in the run directory, and its errors are handed to `failed` and go no further.

        The one place that swallows every Exception: W&B raises its own, protobuf's, socket's, OS and plain Python
        errors, and none of them is a reason to lose hours of recording. Interrupts and exits pass.
        """
        folders = {"DIR": self._folder.parent, "DATA_DIR": self._folder, "CACHE_DIR": self._folder / "cache"}
        settings = {"WANDB_SILENT": "true", **{f"WANDB_{name}": str(path) for name, path in folders.items()}}
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            yield
        except Exception as error:  # noqa: BLE001 (see above)
            reason = " ".join(str(error).split())[:300]
            failed(f"{type(error).__name__}: {reason}" if reason else type(error).__name__)
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                os.environ.update({} if value is None else {name: value})

    def _warn(self, message: str) -> None:
        if message not in self.warnings:
            self.warnings.append(message)
            logger.warning(message)


def open_tracker(
    options: TrackingOptions, *, run_dir: Path, name: str, config: Mapping[str, Any], job_type: str
) -> Tracker:
    """A tracker for this run; a run that was tracked before continues under its W&B id.

    `config` is the resolved config. Online without a key or a reachable server becomes offline, with a warning that
    names the command to upload later.
    """
    run_dir = Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    earlier = read_records(run_dir / RECORDS)
    _drop_half_line(run_dir / RECORDS)
    tracker = Tracker(run_dir, records=len(earlier))
    mode = _allowed(options.wandb)
    tracker.write("start", name=name, job_type=job_type, resumed=bool(earlier), config=dict(config))
    if mode != "disabled":
        about = {"project": options.project, "group": options.group, "tags": list(options.tags), "name": name}
        about |= {"id": _run_id(earlier), "job_type": job_type, "config": plain(dict(config)), "dir": str(run_dir)}
        tracker.connect(mode, about)
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


def _allowed(mode: Mode) -> Mode:
    """The mode, lowered to the one WANDB_MODE asks for: the environment may keep data here, never send it."""
    environment = os.environ.get("WANDB_MODE", "")
    environment = {"dryrun": "offline"}.get(environment, environment)
    return MODES[max(MODES.index(mode), MODES.index(environment))] if environment in MODES else mode


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
