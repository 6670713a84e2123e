"""One of several processes that record a tiny model together; started by test_distributed.

python -m tests.recording.team_worker OUTPUT PARTIAL [EVENT]; an event is kill:N, fail:N or stop:N, after N batches.
"""

import os
import signal
import sys
from pathlib import Path

import torch

from moeprune.recording import distributed
from moeprune.recording.recorder import record
from tests.recording.test_distributed import TOKENS
from tests.tiny import build


def main() -> None:
    output, partial, *events = sys.argv[1:]
    torch.set_num_threads(1)
    distributed.LOST_AFTER = 3.0
    happening, after = events[0].split(":") if events else ("nothing", "0")
    calls = 0

    def progress(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        print("done", done, flush=True)
        if calls == int(after):
            if happening == "fail":
                raise ValueError("a broken GPU")
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[happening])

    team = distributed.join()
    assert team is not None
    with team.together():
        statistics = record(
            build("qwen3_moe"),
            TOKENS,
            batch_tokens=50,
            partial=Path(partial),
            commit_seconds=0.0,
            on_progress=progress,
            team=team,
        )
        statistics.save(Path(f"{output}.{team.rank}"))
        if team.leads:
            team.dismiss()
        else:
            team.wait_for("saved")
            team.tell(f"left/{team.rank}")


if __name__ == "__main__":
    main()
