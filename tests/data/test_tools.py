"""The tools answer like Python's own arithmetic on what they accept, and refuse everything else."""

import gzip
import itertools
import json
import random

import pytest

from moeprune.data.tools import LONGEST_EXPRESSION, ToolError, calculate, run_tool
from moeprune.reference import DATA_DIR


def test_calculator_equals_python_on_random_expressions() -> None:
    chooser = random.Random(0)
    for _ in range(500):
        expression = str(chooser.randint(0, 99))
        for _ in range(chooser.randint(0, 6)):
            expression += f" {chooser.choice('+-*/')}{chooser.choice(['', ' ', ' -'])}{chooser.randint(1, 99)}"
        assert calculate(expression) == eval(expression.replace("/", "//"))


@pytest.mark.parametrize(
    "expression",
    [
        "",
        " ",
        "2 **3",
        "2 // 3",
        "1 / 0",
        "2 3",
        "2 +",
        "*2",
        "(1 + 2)",
        "1.5",
        "0x10",
        "__import__('os')",
        "1e3",
        "１ + １",
    ],
)
def test_calculator_refuses(expression: str) -> None:
    with pytest.raises(ToolError):
        calculate(expression)


def test_calculator_is_bounded() -> None:
    with pytest.raises(ToolError, match=str(LONGEST_EXPRESSION)):
        calculate("9" * (LONGEST_EXPRESSION + 1))


def test_lookup_answers_from_the_trajectory() -> None:
    found = '{"item": "pens", "stock": 3}'
    results = [{"role": "tool", "content": "not json"}, {"role": "tool", "name": "lookup", "content": found}]
    assert run_tool({"name": "lookup", "arguments": {"item": "pens"}}, results) == found
    assert json.loads(run_tool({"name": "lookup", "arguments": {"item": "maps"}}, results)) == {"error": "unknown item"}


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"name": "calculator"},
        {"name": "calculator", "arguments": "1 + 1"},
        {"name": "calculator", "arguments": {"expression": 3}},
        {"name": "lookup", "arguments": {"expression": "1"}},
        {"name": "shell", "arguments": {"expression": "1"}},
    ],
)
def test_malformed_calls_are_tool_errors(call: dict) -> None:
    with pytest.raises(ToolError):
        run_tool(call, [])


def test_every_call_of_the_reference_trajectories_gives_the_recorded_result() -> None:
    with gzip.open(DATA_DIR / "agent.heldout.jsonl.gz", "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    calls = 0
    for record in records:
        messages = record["messages"]
        for before, after in itertools.pairwise(messages):
            for call in before.get("tool_calls") or []:
                if call["function"]["name"] == "lookup":  # a later question may ask for the same item anew
                    assert run_tool(call["function"], [after]) == after["content"]
                else:
                    assert run_tool(call["function"], []) == after["content"]
                calls += 1
    assert calls > 500
