"""One finished grid for the tests that compare with it or go on from a copy."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from moeprune.run import run_data
from moeprune.run.grid import GridOutcome, run_grid
from tests.run.small_grid import write_grid


@dataclass(frozen=True)
class FinishedGrid:
    """What `run_grid` gave, its output folder (the grid beside shared/), and which parts of the data it read."""

    outcome: GridOutcome
    output: Path
    parts_read: list[str]


@pytest.fixture(scope="session")
def finished_grid(tmp_path_factory: pytest.TempPathFactory) -> FinishedGrid:
    """The small grid, made in this process: read it or copy `output`, write nothing into it."""
    folder, read, load = tmp_path_factory.mktemp("finished"), [], run_data.load_tokens
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            run_data, "load_tokens", lambda *words, part, **more: read.append(part) or load(*words, part=part, **more)
        )
        outcome = run_grid(write_grid(folder), [], output=folder / "out")
    return FinishedGrid(outcome, folder / "out", read)
