"""On-policy traces: tools are executed, every end is named, a stopped run goes on and ends with the same file."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from moeprune.artifacts.errors import InputError
from moeprune.data.options import Domain, Intake
from moeprune.data.traces import TraceOptions, TraceReport, load_prompts, write_traces
from moeprune.data.trajectories import load_tokens
from moeprune.models.loading import LoadedModel
from tests.data.test_trajectories import reference_records

END = 3  # <|im_end|>
ASK = {"role": "user", "content": "What is 2 + 3?"}
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "2 + 3"}}</tool_call>'


class Script:
    """Answers every conversation with the same lines, one a turn; None leaves the turn without an end."""

    def __init__(self, tokenizer: Any, lines: list[str]) -> None:
        self.tokenizer, self.lines, self.calls = tokenizer, lines, 0

    def __call__(self, prompts: list[list[int]]) -> list[list[int]]:
        self.calls += 1
        return [self._line(prompt) for prompt in prompts]

    def _line(self, prompt: list[int]) -> list[int]:
        said = self.tokenizer.decode(prompt).count("<|im_start|>assistant") - 1
        line = self.lines[min(said, len(self.lines) - 1)]
        ids: list[int] = self.tokenizer(line.removesuffix("~"))["input_ids"]
        return ids if line.endswith("~") else [*ids, END]


@pytest.fixture
def talk(tokenizer: Any, write: Callable[..., str], tmp_path: Path) -> Callable[..., tuple[list[Any], TraceReport]]:
    def run(records: list[Any], lines: list[str], **options: Any) -> tuple[list[Any], TraceReport]:
        prompts, warnings = load_prompts(Domain(name="prompts", path=write(records)))
        assert not warnings
        report = write_traces(
            Script(tokenizer, lines), tokenizer, prompts, tmp_path / "traces.jsonl",
            end_ids=[END], settings={}, options=TraceOptions(**options),
        )  # fmt: skip
        return [json.loads(line) for line in report.path.read_text().split("\n")[:-1]], report

    return run


def test_a_call_is_executed_and_its_result_fed_back(talk: Callable[..., Any]) -> None:
    traces, report = talk([{"messages": [ASK]}], [CALL, "It is 5."], tools="reference")
    function = {"name": "calculator", "arguments": {"expression": "2 + 3"}}
    assert traces[0]["messages"] == [
        ASK,
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "name": "calculator", "content": "5"},
        {"role": "assistant", "content": "It is 5."},
    ]
    assert [tool["function"]["name"] for tool in traces[0]["tools"]] == ["calculator", "lookup"]
    assert (report.traces, report.resumed, report.ends, report.warnings) == (1, 0, {"answer": 1}, [])


def test_user_messages_are_played_in_order_and_answers_forgotten(talk: Callable[..., Any]) -> None:
    record = {"messages": [{"role": "system", "content": "s"}, ASK, {"role": "assistant", "content": "old"}, ASK]}
    traces, _ = talk([record], ["new"])
    assert [message["content"] for message in traces[0]["messages"]] == [
        "s",
        ASK["content"],
        "new",
        ASK["content"],
        "new",
    ]
    assert "tools" not in traces[0]


@pytest.mark.parametrize(
    ("lines", "end", "messages"),
    [
        (["cut off~"], "length", 2),
        ([CALL], "turns", 7),
        (['<tool_call>{"name": "shell", "arguments": {}}</tool_call>'], "bad call", 2),
        (["<tool_call>no json</tool_call>"], "bad call", 2),
        (['<tool_call>{"name": "calculator", "arguments": {"expression": "1/0"}}</tool_call>'], "bad call", 2),
    ],
)
def test_every_end_has_a_name(talk: Callable[..., Any], lines: list[str], end: str, messages: int) -> None:
    traces, report = talk([{"prompt": "What is 2 + 3?"}], lines, tools="reference", turns=3)
    assert traces[0]["end"] == end
    assert len(traces[0]["messages"]) == messages
    assert report.ends == {end: 1}
    assert report.warnings


def test_without_tools_a_call_is_only_text(talk: Callable[..., Any]) -> None:
    traces, report = talk([{"messages": [ASK]}], [CALL])
    assert traces[0]["messages"][1] == {"role": "assistant", "content": CALL}
    assert report.ends == {"answer": 1}


def test_texts_are_gone_on_with(talk: Callable[..., Any]) -> None:
    traces, _ = talk([{"text": "The whale "}], ["swims."])
    assert traces[0] == {"prompt": "The whale ", "completion": "swims.", "end": "answer"}


def test_context_bounds_a_trace(talk: Callable[..., Any]) -> None:
    traces, _ = talk([{"messages": [ASK] * 3}], ["word " * 20], context=60)
    assert traces[0]["end"] == "length"
    assert len(traces[0]["messages"]) < 6


def test_lookup_answers_for_the_question_that_asks(talk: Callable[..., Any]) -> None:
    def result(stock: int) -> dict[str, Any]:
        return {"role": "tool", "name": "lookup", "content": json.dumps({"item": "pens", "stock": stock})}

    look = '<tool_call>{"name": "lookup", "arguments": {"item": "pens"}}</tool_call>'
    record = {"messages": [ASK, result(1), ASK, result(2)]}
    traces, _ = talk([record], [look, "so", look, "so"], tools="reference")
    assert [m["content"] for m in traces[0]["messages"] if m["role"] == "tool"] == [
        result(1)["content"],
        result(2)["content"],
    ]


def test_records_without_a_question(write: Callable[..., str]) -> None:
    path = write([{"messages": [{"role": "assistant", "content": "x"}]}, {"input_ids": [1]}, {"prompt": "x"}])
    with pytest.raises(InputError, match=r"data\.jsonl:1: messages has no user message"):
        load_prompts(Domain(name="d", path=path))
    prompts, warnings = load_prompts(Domain(name="d", path=path), Intake(on_bad_record="skip"))
    assert len(prompts) == 1
    assert "2 of 3 records skipped (2 no question" in warnings[0]


class Stop(Exception):
    pass


def test_a_stopped_run_goes_on_and_ends_the_same(reference: LoadedModel, tmp_path: Path) -> None:
    from moeprune.evaluation.decoding import generate

    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps(record) for record in reference_records("agent", "heldout")[:10]]
    path.write_text("\n".join(lines))
    prompts, _ = load_prompts(Domain(name="prompts", path=str(path)))
    speak = partial(generate, reference.model, max_new_tokens=48, end_ids=[END], temperature=0.7, seed=1)
    options = TraceOptions(tools="reference", batch_size=4)

    def traces(name: str, **changed: Any) -> TraceReport:
        arguments = {"end_ids": [END], "settings": {"seed": 1}, "options": options, **changed}
        return write_traces(speak, reference.tokenizer, prompts, tmp_path / name, **arguments)

    def stop(done: int, _: int) -> None:
        if done == 8:
            raise Stop

    whole = traces("whole.jsonl")
    with pytest.raises(Stop):
        traces("parts.jsonl", on_progress=stop)
    partial_file = tmp_path / "parts.jsonl.partial"
    with partial_file.open("ab") as out:
        out.write(b'{"messages": [{"role": "us')  # a line that was being written
    with pytest.raises(InputError, match="other settings"):
        traces("parts.jsonl", settings={"seed": 2})
    resumed = traces("parts.jsonl")
    assert resumed.resumed == 8
    assert resumed.path.read_bytes() == whole.path.read_bytes()
    assert not partial_file.exists()
    with pytest.raises(InputError, match="is there already"):
        traces("parts.jsonl")
    assert whole.ends["answer"] >= 8
    told = load_tokens([Domain(name="d", path=str(whole.path), count="assistant")], reference.tokenizer).manifest["d"]
    assert told["records_used"] == 10
    assert told["tokens_by_role"]["tool"] > 0
