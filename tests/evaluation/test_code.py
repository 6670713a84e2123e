"""Generated programs: right ones pass, all others fail within their limits, and nothing runs unless it is asked for."""

import gzip
import json
import os
import time
from functools import partial

import pytest

from moeprune.artifacts.errors import InputError
from moeprune.config.schema import RunConfig
from moeprune.evaluation.code import (
    Limits,
    code_metrics,
    code_problems,
    code_warnings,
    finished,
    network_can_be_blocked,
    passes,
    require_code,
    runs_through,
)
from moeprune.evaluation.intervals import share_metrics
from moeprune.evaluation.options import CodeOptions
from moeprune.evaluation.students import Student, with_base
from moeprune.run.requirements import require_config
from moeprune.run.run_data import Inputs
from tests.evaluation.material import random_plan

PROBLEMS = [
    ("add", "    return a + b\n", "    return a - b\n", "assert candidate(2, 3) == 5"),
    (
        "first",
        "    return sorted([a, b])[0]\n",
        "    return a\n",
        "assert candidate(4, 1) == 1\n    assert candidate(1, 4) == 1",
    ),
    ("power", "    return a**b\n", "    return a*b\n", "assert candidate(2, 10) == 1024"),
]
QUICK = Limits(seconds=4)


def problem(name, test):
    prompt = f'def {name}(a, b):\n    """What {name} gives for two numbers."""\n'
    return {"task_id": name, "prompt": prompt, "entry_point": name, "test": f"def check(candidate):\n    {test}\n"}


@pytest.fixture
def options(tmp_path):
    path = tmp_path / "three.jsonl.gz"
    lines = [json.dumps(problem(name, test)) for name, _, _, test in PROBLEMS]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return CodeOptions(problems=str(path), run_generated_code=True, seconds=5, max_new_tokens=8)


def test_the_right_completions_pass_and_the_wrong_ones_do_not(options):
    for found, (_, right, wrong, _) in zip(code_problems(options), PROBLEMS, strict=True):
        assert passes(found, "\n" + right, options)
        assert passes(found, "\n" + right + "\n\ndef main():\n    raise SystemExit\n\nmain()", options)
        assert not passes(found, "\n" + wrong, options)


def test_a_completion_ends_where_the_function_does():
    assert finished("\n    return 1\n\nprint(f())") == "\n    return 1\n"
    assert finished("\n    if a:\n        return 1\n    return 2") == "\n    if a:\n        return 1\n    return 2"


@pytest.mark.parametrize(
    "program",
    [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "raise KeyboardInterrupt",
        "x = [0] * (2 << 30)",
        "open('big', 'w').write('x' * (1 << 22))",
        "def broken(:",
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
        "assert False",
    ],
)
def test_what_ends_in_another_way_fails(program):
    assert not runs_through(program, QUICK)


def test_a_program_that_hangs_and_its_children_are_ended(tmp_path):
    mark = tmp_path / "child"
    program = (
        "import os, time\n"
        f"if os.fork() == 0:\n    time.sleep(3)\n    open({str(mark)!r}, 'w')\n    os._exit(0)\n"
        "while True:\n    time.sleep(1)"
    )
    started = time.monotonic()
    assert not runs_through(program, Limits(seconds=1))
    assert time.monotonic() - started < 20
    time.sleep(3.5)
    assert not mark.exists()


def test_it_sees_no_environment_and_an_empty_directory(monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    assert "SECRET_KEY" in os.environ
    assert runs_through(
        "import os\nassert set(os.environ) <= {'HOME', 'PATH', 'LC_CTYPE'}\nassert os.listdir() == []", QUICK
    )


@pytest.mark.skipif(not network_can_be_blocked(), reason="this system does not let a process give up its network")
def test_it_has_no_network():
    reach = "import socket\nsocket.create_connection(('127.0.0.1', {}), 1)"
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), 1).close()  # this process reaches it
        assert not runs_through(reach.format(port), QUICK)
    assert "without network" in code_warnings(CodeOptions())[0]


def test_it_is_measured_like_any_task(reference, options):
    plan = random_plan(reference.model, 16)
    measure = partial(code_metrics, tokenizer=reference.tokenizer, options=options)
    base = share_metrics("task/accuracy/three", [True, False, True], [])
    metrics = with_base(measure, reference.model, {"a": Student(reference.model, plan)}, base=base)["a"]
    assert metrics["task/accuracy/three"] == 0  # the reference model writes no such programs
    assert metrics["task/accuracy/three/base"] == pytest.approx(2 / 3)
    assert {"task/accuracy/three/ci_low", "task/accuracy/three/ci_high"} <= set(metrics)


def test_nothing_runs_unless_it_is_asked_for(options, tmp_path):
    with pytest.raises(InputError, match="run_generated_code=true"):
        require_code(options.model_copy(update={"run_generated_code": False}))
    require_code(options)
    (tmp_path / "bad.jsonl").write_text(json.dumps(problem("add", "pass")) + "\n" + '{"prompt": 3}\n')
    for problems, message in [
        (tmp_path / "none.jsonl", "no such file"),
        (tmp_path / "bad.jsonl", "bad.jsonl:2: task_id, prompt, entry_point, test"),
    ]:
        with pytest.raises(InputError, match=message):
            require_code(CodeOptions(problems=str(problems), run_generated_code=True))


def test_a_run_refuses_it_before_anything_is_loaded_and_keys_know_it(options):
    def inputs(code):
        value = {"evaluation": {"code": code, "domains": [{"name": "agent", "path": "reference:agent", "tokens": 500}]}}
        return Inputs(RunConfig.model_validate(value))

    with pytest.raises(InputError, match="run_generated_code"):
        require_config(inputs({"problems": options.problems}))
    asked = options.model_dump(mode="json")
    require_config(inputs(asked))
    assert "code" not in inputs(None).data.evaluation_identity[0]  # keys of runs without it stay what they were
    before = inputs(asked).data.evaluation_identity
    with open(options.problems, "ab") as file:
        file.write(gzip.compress(("\n" + json.dumps(problem("sub", "pass"))).encode()))
    assert inputs(asked).data.evaluation_identity != before
