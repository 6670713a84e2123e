"""The reference tokenizer, a tokenizer with a BOS of its own, and a way to write data files."""

import copy
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
def speaking(tokenizer: Any) -> Callable[[str | None], Any]:
    """The reference tokenizer with another chat template."""

    def with_template(template: str | None) -> Any:
        other = copy.deepcopy(tokenizer)
        other.chat_template = template
        other.bos_token = "<|endoftext|>"
        return other

    return with_template


@pytest.fixture
def with_bos(speaking: Callable[[str | None], Any]) -> Callable[[str | None], Any]:
    """The same, and the tokenizer puts a BOS before every text, as Llama's does."""

    def with_template(template: str | None) -> Any:
        from tokenizers.processors import TemplateProcessing

        other = speaking(template)
        other.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
        assert other("a")["input_ids"][0] == 0
        return other

    return with_template


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes records as JSON lines and returns the path."""

    def lines(records: list[Any], name: str = "data.jsonl") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        return str(path)

    return lines
