"""Chat messages -> messages as templates take them: content is text, tool arguments are objects."""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from moeprune.data.readers import RecordProblem, kind_of

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
TEXT_PARTS = ("text", "input_text", "output_text")


def as_list(value: Any, where: str, changes: Counter[str]) -> list[Any]:
    """The list, also when a column holds it as JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RecordProblem(f"bad {where}", where, f"is text that is not JSON ({error})") from error
        changes[f"{where} parsed"] += 1
    if not isinstance(value, list):
        raise RecordProblem(f"bad {where}", where, f"is {kind_of(value)}, not a list")
    return value


def conversation(turns: list[Any], system: Any, changes: Counter[str]) -> list[dict[str, Any]]:
    """ShareGPT turns (from, value) as messages (role, content); a function_call turn becomes a tool call."""
    messages: list[dict[str, Any]] = []
    if isinstance(system, str) and system:
        messages.append({"role": "system", "content": system})
    for index, turn in enumerate(turns):
        where = f"conversations[{index}]"
        if not isinstance(turn, dict):
            raise RecordProblem("bad message", where, f"is {kind_of(turn)}, not an object")
        if "from" not in turn:  # some sets under this name hold role and content already
            messages.append(turn)
            continue
        speaker, value = turn["from"], turn.get("value")
        if speaker == "function_call":
            messages.append({"role": "assistant", "content": "", "tool_calls": _called(value, f"{where}.value")})
        elif isinstance(speaker, str) and speaker in SHAREGPT_ROLES:
            messages.append({"role": SHAREGPT_ROLES[speaker], "content": value})
        else:
            known = ", ".join((*SHAREGPT_ROLES, "function_call"))
            raise RecordProblem("bad message", f"{where}.from", f"is {speaker!r}; known are {known}")
        changes["turns renamed"] += 1
    return messages


def _called(value: Any, where: str) -> list[dict[str, Any]]:
    try:
        calls = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise RecordProblem("bad tool call", where, f"is not JSON ({error})") from error
    calls = calls if isinstance(calls, list) else [calls]
    return [{"type": "function", "function": call} for call in calls]


def normalise_messages(
    messages: Any, where: str, fields: Mapping[str, str], changes: Counter[str]
) -> tuple[dict[str, Any], ...]:
    """The messages with text content and object arguments. Raises RecordProblem naming messages[i].field."""
    if not isinstance(messages, list) or not messages:
        raise RecordProblem("no messages", where, f"is {kind_of(messages)}; a trajectory has at least one message")
    return tuple(_message(message, f"{where}[{index}]", fields, changes) for index, message in enumerate(messages))


def _message(message: Any, where: str, fields: Mapping[str, str], changes: Counter[str]) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RecordProblem("bad message", where, f"is {kind_of(message)}, not an object")
    for ours in ("role", "content"):
        field = fields.get(ours, ours)
        if field != ours and field in message:
            message = {ours if key == field else key: item for key, item in message.items()}
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RecordProblem("bad message", f"{where}.role", f"is {kind_of(role)}, not a role")
    if message.get("function_call") is not None:
        raise RecordProblem("bad tool call", f"{where}.function_call", "is the old form; write it under tool_calls")
    fresh = {**message, "content": _content(message, f"{where}.content", changes)}
    if message.get("tool_calls"):
        fresh["tool_calls"] = _calls(message["tool_calls"], f"{where}.tool_calls", changes)
    return fresh


def _content(message: dict[str, Any], where: str, changes: Counter[str]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        changes["content null" if "content" in message else "content missing"] += 1
        return ""
    if not isinstance(content, list):
        raise RecordProblem("bad content", where, f"is {kind_of(content)}; write it as text")
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and part.get("type", "text") in TEXT_PARTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, dict) else kind_of(part)
            raise RecordProblem("bad content", f"{where}[{index}]", f"is a part of type {kind!r}; only text is read")
    changes["text parts joined"] += 1
    return "".join(texts)


def _calls(calls: Any, where: str, changes: Counter[str]) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RecordProblem("bad tool call", where, f"is {kind_of(calls)}, not a list")
    return [_call(call, f"{where}[{index}]", changes) for index, call in enumerate(calls)]


def _call(call: Any, where: str, changes: Counter[str]) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise RecordProblem("bad tool call", where, f"is {kind_of(call)}, not an object")
    if call.get("function") is not None:
        return {**call, "function": _function(call["function"], f"{where}.function", changes)}
    return _function(call, where, changes)


def _function(function: Any, where: str, changes: Counter[str]) -> dict[str, Any]:
    if not isinstance(function, dict):
        raise RecordProblem("bad tool call", where, f"is {kind_of(function)}, not an object")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise RecordProblem("bad tool call", f"{where}.name", f"is {kind_of(function.get('name'))}, not a name")
    arguments, where = function.get("arguments"), f"{where}.arguments"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise RecordProblem("bad tool call", where, f"is not a JSON object ({error})") from error
        if isinstance(arguments, dict):
            changes["arguments parsed"] += 1
    if not isinstance(arguments, dict):
        raise RecordProblem("bad tool call", where, f"is not a JSON object but {kind_of(arguments)}")
    return {**function, "arguments": arguments}
