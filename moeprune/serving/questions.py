"""What an engine is asked: token ids of texts and of conversations, so that no two tokenizers can disagree unseen."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moeprune.artifacts.errors import InputError

NEW_TOKENS = 16  # generated for every prompt
TEXTS = (
    "The most important thing about a library is that",
    "def mean(values):\n    total = 0\n    for value in values:\n",
    '{"name": "Ada", "born": 1815, "fields": ["mathematics",',
    "To prove the claim, suppose that n is even. Then",
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluate an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]
SYSTEM = {"role": "system", "content": "You are a careful assistant. Use a tool when you need a number."}
QUESTION = {"role": "user", "content": "What is 17 * 23?"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call00001",  # some templates insist on nine characters
            "type": "function",
            "function": {"name": "calculator", "arguments": {"expression": "17 * 23"}},
        }
    ],
}
RESULT = {"role": "tool", "name": "calculator", "tool_call_id": "call00001", "content": "391"}


@dataclass(frozen=True)
class Chat:
    """A conversation, and what this process's template makes of it."""

    name: str
    messages: tuple[dict[str, Any], ...]
    tools: list[dict[str, Any]] | None
    ids: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        """The conversation as engines are asked for it; arguments are text there, as in the OpenAI interface."""
        messages = json.loads(json.dumps(self.messages))
        for message in messages:
            for call in message.get("tool_calls", []):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        return {"messages": messages, "tools": self.tools, "add_generation_prompt": True}


@dataclass(frozen=True)
class Questions:
    """Everything one engine is asked about one checkpoint."""

    texts: tuple[str, ...]
    text_ids: tuple[tuple[int, ...], ...]
    chats: tuple[Chat, ...]
    warnings: tuple[str, ...]

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        """Token ids of every prompt, texts first."""
        return (*self.text_ids, *(chat.ids for chat in self.chats))

    @property
    def names(self) -> tuple[str, ...]:
        return (*(f"text {i + 1}" for i in range(len(self.texts))), *(chat.name for chat in self.chats))

    @property
    def longest(self) -> int:
        return max(map(len, self.prompts))


def questions(tokenizer: Any, *, texts: Sequence[str] = TEXTS) -> Questions:
    """Four texts and, where the tokenizer has a template, a chat, one with tools and one after a tool's result.

    A template that fails on a conversation leaves it out, with a warning: base models and small chat templates do.
    Raises InputError when the tokenizer makes nothing of the texts.
    """
    ids = tuple(tuple(tokenizer(text)["input_ids"]) for text in texts)
    if not all(ids):
        raise InputError("verify: the checkpoint's tokenizer makes no tokens of plain text; are its files complete?")
    chats, warnings = [], []
    if getattr(tokenizer, "chat_template", None):
        for name, messages, tools in _conversations():
            try:
                rendered = _render(tokenizer, messages, tools)
            except _template_errors() as error:
                warnings.append(f"verify: the chat template refuses {name} ({error}); not compared")
                continue
            chats.append(Chat(name, tuple(messages), tools, tuple(rendered)))
    else:
        warnings.append("verify: the checkpoint has no chat template; only plain text was compared")
    return Questions(tuple(texts), ids, tuple(chats), tuple(warnings))


def _conversations() -> list[tuple[str, list[dict[str, Any]], list[dict[str, Any]] | None]]:
    return [
        ("a chat", [SYSTEM, QUESTION], None),
        ("a chat with tools", [SYSTEM, QUESTION], TOOLS),
        ("a tool's result", [SYSTEM, QUESTION, CALL, RESULT], TOOLS),
    ]


def _render(tokenizer: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int]:
    rendering = tokenizer.apply_chat_template(messages, tools=tools, tokenize=True, add_generation_prompt=True)
    return list(rendering["input_ids"]) if hasattr(rendering, "keys") else list(rendering)


def _template_errors() -> tuple[type[Exception], ...]:
    """What templates raise: jinja's errors, and Python's where a template meets a value it does not expect."""
    from jinja2 import TemplateError

    return (TemplateError, TypeError, ValueError, KeyError)
