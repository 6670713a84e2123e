"""`moeprune generate` through the command line: traces that record as calibration, the same for the same seed."""

import json

import pytest

from moeprune.artifacts.errors import InputError
from moeprune.commands.generate import generate_file
from tests.test_cli import moeprune

PROMPTS = [
    {"prompt": "What is 17 + 25?"},
    {"messages": [{"role": "user", "content": "How much is 3 * 4?"}, {"role": "assistant", "content": "12"}]},
    {"text": "def add(a, b):\n"},
]
WORDS = ("generate", "reference", "prompts.jsonl", "--tools", "reference", "--max-new-tokens", 48)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generate")
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return folder, moeprune(*WORDS, "-o", "traces.jsonl", cwd=folder)


def test_one_trace_a_prompt_that_records_as_calibration(made):
    folder, done = made
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "traces.jsonl"
    assert "3 prompts" in done.stderr
    traces = [json.loads(line) for line in (folder / "traces.jsonl").read_text().splitlines()]
    assert [trace["messages"][0] for trace in traces[:2]] == [
        {"role": "user", "content": "What is 17 + 25?"},
        {"role": "user", "content": "How much is 3 * 4?"},
    ]
    called = traces[0]["messages"][1]["tool_calls"][0]["function"]["name"]
    assert called == "calculator"
    assert traces[0]["messages"][2]["role"] == "tool"
    assert (traces[2]["prompt"], bool(traces[2]["completion"])) == ("def add(a, b):\n", True)
    assert not (folder / "traces.jsonl.partial").exists()
    recorded = moeprune("record", "reference", "own=traces.jsonl", "-o", "s.safetensors", "--json", cwd=folder)
    assert recorded.returncode == 0, recorded.stderr
    assert json.loads(recorded.stdout)["domains"]["own"]["records_used"] == 3


def test_the_seed_decides_the_words(made):
    folder, _ = made
    options = {"tools": "reference", "max_new_tokens": 48}
    again = generate_file("reference", str(folder / "prompts.jsonl"), folder / "again.jsonl", options=options)
    assert (again["count"], again["resumed"], sum(again["ends"].values())) == (3, 0, 3)
    assert (folder / "again.jsonl").read_bytes() == (folder / "traces.jsonl").read_bytes()
    options |= {"seed": 1, "temperature": 2.0}
    generate_file("reference", str(folder / "prompts.jsonl"), folder / "other.jsonl", options=options)
    assert (folder / "other.jsonl").read_bytes() != (folder / "traces.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("model", "prompts", "output", "options", "message"),
    [
        ("reference", "prompts.jsonl", "traces.jsonl", {}, "is there already"),
        ("reference", "prompts.jsonl", "x.txt", {}, "ends in .jsonl"),
        ("reference", "none.jsonl", "x.jsonl", {}, "none.jsonl"),
        ("reference", "prompts.jsonl", "x.jsonl", {"tools": "bash"}, "tools"),
        ("reference", "prompts.jsonl", "x.jsonl", {"temperature": -1.0}, "temperature"),
        ("reference", "prompts.jsonl", "x.jsonl", {"turns": 0}, "turns"),
        ("nowhere/at/all", "prompts.jsonl", "x.jsonl", {}, "does not exist"),
    ],
)
def test_bad_input_is_refused_and_leaves_nothing(made, model, prompts, output, options, message):
    folder, _ = made
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(InputError, match=message):
        generate_file(model, str(folder / prompts), folder / output, options=options)
    assert sorted(path.name for path in folder.iterdir()) == before
