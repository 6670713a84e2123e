"""Messages of a run: short lines and progress bars for people, the same lines with times in log.txt."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

LOGGER = logging.getLogger("moeprune")


@contextmanager
def logged(path: Path) -> Iterator[None]:
    """Inside, every message of the package also goes to the file, with times."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    LOGGER.addHandler(handler)
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        handler.close()


def speak(*, quiet: bool = False) -> None:
    """Send the package's lines to standard error; standard output is for results alone."""
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False
    if not any(getattr(handler, "for_people", False) for handler in LOGGER.handlers):
        speaker = logging.StreamHandler(sys.stderr)
        speaker.for_people = True  # type: ignore[attr-defined]
        speaker.setFormatter(logging.Formatter("%(message)s"))
        LOGGER.addHandler(speaker)
    for handler in LOGGER.handlers:
        if isinstance(handler, logging.StreamHandler) and getattr(handler, "for_people", False):
            handler.setStream(sys.stderr)  # a caller may have replaced it since
            handler.setLevel(logging.WARNING if quiet else logging.INFO)


def say(message: str) -> None:
    LOGGER.info(message)


def warn(message: str) -> None:
    LOGGER.warning("warning: %s", message)


@contextmanager
def progress(description: str, *, unit: str = "tokens") -> Iterator[Callable[[int, int], None]]:
    """A function (done, in all) that moves a bar with rate and time left; shows nothing without a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} " + unit),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task: TaskID | None = None

        def advance(done: int, total: int) -> None:
            nonlocal task
            if task is None:
                task = bar.add_task(description, total=total, rate="")
            speed = bar.tasks[0].speed
            bar.update(task, completed=done, rate=f"{speed:,.0f} {unit}/s" if speed else "")

        yield advance
