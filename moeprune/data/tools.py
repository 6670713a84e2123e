"""What a tool of the reference tasks answers: a calculator on integers and a lookup in the trajectory's own results."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

LONGEST_EXPRESSION = 200  # characters; bounds the size of every number that can come out
CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
TOKEN = re.compile(r"\s*([0-9]+|[+\-*/])", re.ASCII)


def _schema(name: str, description: str, argument: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = (
    _schema("calculator", "Evaluate an arithmetic expression.", "expression"),
    _schema("lookup", "Return the stock of an item.", "item"),
)


class ToolError(ValueError):
    """The call cannot be executed: an unknown tool, wrong arguments, or something that is not an expression."""


def read_calls(text: str) -> list[dict[str, Any]]:
    """The calls {"name", "arguments"} that stand between tool call tags in what a model wrote, in order.

    Raises ToolError for tags around anything else.
    """
    calls = []
    for content in CALL.findall(text):
        try:
            call = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ToolError(f"a tool call that is not JSON ({error})") from error
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise ToolError("a tool call without a name")
        calls.append(call)
    return calls


def run_tool(call: Mapping[str, Any], tool_messages: Sequence[Mapping[str, Any]]) -> str:
    """The text that the tool gives back for `call` = {"name", "arguments": object}.

    `lookup` answers from `tool_messages`, the tool results of the trajectory that asked, so a question has the
    answer its author meant. Raises ToolError for anything that is not a well-formed call of a known tool.
    """
    name, arguments = call.get("name"), call.get("arguments")
    if not isinstance(arguments, Mapping):
        raise ToolError("arguments is not a JSON object")
    if name == "calculator":
        return str(calculate(_text_argument(arguments, "expression")))
    if name == "lookup":
        return _lookup(_text_argument(arguments, "item"), tool_messages)
    raise ToolError(f"unknown tool {name!r}; there are calculator and lookup")


def calculate(expression: str) -> int:
    """The value of an expression of integers with + - * / (/ rounds down; * and / bind before + and -).

    A sign may stand before a number. No brackets, no powers, no names: whatever is not digits, these four
    characters or white space is refused, as is anything longer than LONGEST_EXPRESSION.
    """
    tokens = _tokens(expression)
    total, position = _product(tokens, 0)
    while position < len(tokens):
        operator = tokens[position]
        term, position = _product(tokens, position + 1)
        total = total + term if operator == "+" else total - term
    return total


def _tokens(expression: str) -> list[str]:
    if len(expression) > LONGEST_EXPRESSION:
        raise ToolError(f"an expression of {len(expression)} characters; the limit is {LONGEST_EXPRESSION}")
    tokens, position, text = [], 0, expression.rstrip()
    while position < len(text):
        match = TOKEN.match(text, position)
        if match is None:
            raise ToolError(f"{text[position]!r} is not a digit or one of + - * /")
        tokens.append(match.group(1))
        position = match.end()
    return tokens


def _product(tokens: list[str], position: int) -> tuple[int, int]:
    """Value of the factors from `position` up to the next + or -, and the position of that sign."""
    value, position = _factor(tokens, position)
    while position < len(tokens) and tokens[position] not in "+-":
        operator = tokens[position]
        if operator not in "*/":
            raise ToolError(f"{operator} follows a number without an operator")
        factor, position = _factor(tokens, position + 1)
        if operator == "/" and factor == 0:
            raise ToolError("division by zero")
        value = value * factor if operator == "*" else value // factor
    return value, position


def _factor(tokens: list[str], position: int) -> tuple[int, int]:
    sign = 1
    while position < len(tokens) and tokens[position] in "+-":
        sign, position = -sign if tokens[position] == "-" else sign, position + 1
    if position == len(tokens):
        raise ToolError("the expression ends where a number should stand")
    if not tokens[position].isdigit():
        raise ToolError(f"{tokens[position]!r} stands where a number should")
    return sign * int(tokens[position]), position + 1


def _text_argument(arguments: Mapping[str, Any], name: str) -> str:
    value = arguments.get(name)
    if not isinstance(value, str):
        raise ToolError(f"argument {name!r} is missing or not a string")
    return value


def _lookup(item: str, tool_messages: Sequence[Mapping[str, Any]]) -> str:
    for message in tool_messages:
        if message.get("name", "lookup") != "lookup":
            continue
        content = message.get("content")
        try:
            answer = json.loads(content) if isinstance(content, str) else None
        except ValueError:
            continue
        if isinstance(answer, dict) and answer.get("item") == item:
            assert isinstance(content, str)
            return content
    return json.dumps({"error": "unknown item"})
