"""Runs a program that a model wrote, in a process of its own with limits. A fence against accidents, no prison.

Limits: wall and CPU time, memory, file size, open files; an empty directory; no environment, so no keys; no network
where the system lets a process give it up (Linux user namespaces). Files that this user can read stay readable: for
models that you do not trust, run all of moeprune in a container.
"""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

# Runs in the child, before the program: gives up network and limits itself, then executes what comes in on stdin.
# The secret is said by this text and only after the program has run to its end: leaving early passes nothing.
GUARD = """
import os, sys
secret, seconds, memory, network = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
del sys.argv[1:]
if network == "none":
    import ctypes
    if ctypes.CDLL(None, use_errno=True).unshare(0x10000000 | 0x40000000):  # CLONE_NEWUSER | CLONE_NEWNET
        os._exit(97)
import resource
for kind, limit in (("CPU", seconds + 1), ("AS", memory), ("FSIZE", 2**20), ("NOFILE", 64), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + kind), (limit, limit))
program = sys.stdin.read()
told, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
for stream in (0, 1, 2):
    os.dup2(nothing, stream)
exec(compile(program, "program", "exec"), {"__name__": "__main__"})
os.write(told, secret.encode())
"""


@dataclass(frozen=True)
class Limits:
    """What one program may take."""

    seconds: int = 10
    memory: int = 2**30  # bytes of address space


def runs_through(program: str, limits: Limits) -> bool:
    """Whether the program runs to its last line without an error, within the limits."""
    secret = secrets.token_hex(16)
    network = "none" if network_can_be_blocked() else "open"
    return _run(program, secret, limits, network)[1] == secret


@cache
def network_can_be_blocked() -> bool:
    """Whether a process can give its network up here."""
    return _run("", "yes", Limits(), "none") == (0, "yes")


def _run(program: str, secret: str, limits: Limits, network: str) -> tuple[int, str]:
    """The child's exit code and what it said; its whole process group is gone afterwards."""
    command = [sys.executable, "-I", "-c", GUARD, secret, str(limits.seconds), str(limits.memory), network]
    with tempfile.TemporaryDirectory() as empty:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            errors="replace",
            cwd=empty,
            env={"HOME": empty, "PATH": os.defpath},
            start_new_session=True,
        )
        try:
            told, _ = child.communicate(program, timeout=limits.seconds)
        except subprocess.TimeoutExpired:
            told = ""
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            for pipe in (child.stdin, child.stdout):
                with suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]
    return child.returncode, told
