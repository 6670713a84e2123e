"""The reference tokenizer and a way to write data files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moeprune.reference import MODEL_DIR

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


def called(arguments: Any, **message: Any) -> dict[str, Any]:
    """An assistant message that calls the calculator."""
    call = {"type": "function", "function": {"name": "calculator", "arguments": arguments}}
    return {"role": "assistant", **message, "tool_calls": [call]}


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes records as JSON lines and returns the path."""

    def lines(records: list[Any], name: str = "data.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        return str(path)

    return lines
