"""Several processes that record together: the sets of one process, and a clear end when one of them is lost."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.statistics import SUMS, RoutingStatistics
from moeprune.recording import distributed
from moeprune.recording.distributed import LostRankError, Team, join
from moeprune.recording.recorder import record
from tests.tiny import build
from tests.tokens import random_pieces, token_set

ROOT = Path(__file__).parents[2]
TOKENS = token_set(random_pieces([40, 17, 33, 25, 64, 9, 12, 80, 45, 28]))


class Store:
    """A store in this process."""

    def __init__(self):
        self.values = {}

    def set(self, key, value):
        self.values[key] = value.encode()

    def get(self, key):
        return self.values[key]

    def check(self, keys):
        return all(key in self.values for key in keys)


def free_port():
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


def start(folder, *, size, events=None):
    """`size` processes on this machine, with what torchrun would set, and nobody who looks after them."""
    port = free_port()
    workers = []
    for rank in range(size):
        place = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        event = [events[rank]] if events and rank in events else []
        command = [sys.executable, "-m", "tests.recording.team_worker", folder / "out", folder / "partial", *event]
        environment = os.environ | {key: str(value) for key, value in place.items()}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        workers.append(subprocess.Popen(list(map(str, command)), cwd=ROOT, env=environment, **pipes))
    return workers


def finish(workers, seconds=300):
    """(exit code, standard output, standard error) of each."""
    ends = time.monotonic() + seconds
    out = []
    for worker in workers:
        told, errors = worker.communicate(timeout=max(1, ends - time.monotonic()))
        out.append((worker.returncode, told, errors))
    return out


def recorded(folder, rank=0):
    return RoutingStatistics.load(Path(f"{folder / 'out'}.{rank}"))


def assert_equal(a, b):
    for group, other in ((a.domains, b.domains), (a.half, b.half)):
        for name, sums in group["all"].items():
            for statistic in (*SUMS, "output_max"):
                np.testing.assert_array_equal(getattr(sums, statistic), getattr(other["all"][name], statistic))


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """What two processes recorded, uninterrupted."""
    folder = tmp_path_factory.mktemp("together")
    ends = finish(start(folder, size=2))
    assert [code for code, _, _ in ends] == [0, 0], ends
    return folder


def test_shares_are_all_batches_once_and_of_similar_size():
    sizes = [700, 100, 300, 200, 650, 50, 400, 350, 25, 600]
    batches = [[number] for number in range(len(sizes))]
    shares = [Team(Store(), rank, 3).share(batches, sizes) for rank in range(3)]
    assert sorted(number for share in shares for (number,) in share) == list(range(10))
    loads = [sum(sizes[number] for (number,) in share) for share in shares]
    assert max(loads) <= 1.1 * sum(sizes) / 3
    assert all(share == sorted(share) for share in shares)


def test_two_processes_count_what_one_counts(together):
    alone = record(build("qwen3_moe"), TOKENS, batch_tokens=50)
    for rank in range(2):
        both = recorded(together, rank)
        assert both.fingerprint == alone.fingerprint
        for group, other in ((alone.domains, both.domains), (alone.half, both.half)):
            for name, sums in group["all"].items():
                theirs = other["all"][name]
                np.testing.assert_array_equal(theirs.co_count, sums.co_count)
                if group is alone.domains:  # a file keeps no maxima of halves
                    np.testing.assert_array_equal(theirs.output_max, sums.output_max)
                assert int(theirs.tokens) == int(sums.tokens)
                for statistic in SUMS:
                    if getattr(sums, statistic) is not None:
                        # float64 sums of the same numbers in another order
                        np.testing.assert_allclose(getattr(theirs, statistic), getattr(sums, statistic), rtol=1e-13)


def test_every_process_has_the_sums_of_all(together):
    assert_equal(recorded(together, 0), recorded(together, 1))


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_process_ends_the_others_and_all_go_on_from_their_parts(together, tmp_path, lost):
    started = time.monotonic()
    ends = finish(start(tmp_path, size=2, events={lost: "kill:2"}))
    assert ends[lost][0] == -signal.SIGKILL
    code, _, errors = ends[1 - lost]
    assert code == 1
    assert "LostRankError" in errors
    assert time.monotonic() - started < 150
    again = finish(start(tmp_path, size=2))
    assert [code for code, _, _ in again] == [0, 0], again
    first = int(again[lost][1].split()[1])
    assert first > int(ends[lost][1].split()[1]), "it began again instead of going on"
    assert_equal(recorded(tmp_path), recorded(together))


def test_a_process_that_hangs_counts_as_lost(tmp_path):
    workers = start(tmp_path, size=2, events={1: "stop:2"})
    try:
        _, errors = workers[0].communicate(timeout=300)
        assert workers[0].returncode == 1
        assert "rank 1 of 2 has given no sign of life for 3 s" in errors
    finally:
        workers[1].kill()
        workers[1].communicate()


def test_an_error_reaches_the_others_with_its_reason(tmp_path):
    (code, _, errors), _ = finish(start(tmp_path, size=2, events={1: "fail:1"}))
    assert code == 1
    assert "rank 1 of 2 failed: ValueError: a broken GPU" in errors


def test_a_missing_place_is_bad_input(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError, match="torchrun"):
        join()


def test_one_process_is_no_team(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert join() is None


def test_a_leader_that_never_comes_is_lost(monkeypatch):
    monkeypatch.setattr(distributed, "LOST_AFTER", 0.2)
    monkeypatch.setattr(distributed, "BEAT", 0.05)
    with pytest.raises(LostRankError, match="rank 0 of 2 has given no sign"):
        Team(Store(), 1, 2).wait_for("order")
