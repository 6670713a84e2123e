"""Agent trajectories about counting things: chat messages with tool calls, the same for the same seed.

    python trajectories.py --count 600 --seed 3 -o agent.heldout.jsonl

One JSON object a line: `messages` (a system message, then one to three questions with their tool calls, tool results
and answers, each answer ending in `#### NUMBER`) and `tools`. The shipped agent.calibration is the beginning of seed 1,
whose first 16,000 trajectories trained the model; agent.heldout is seed 3.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Message = dict[str, Any]

NAMES = (
    *("Ana", "Ben", "Carla", "David", "Eva", "Felix", "Greta", "Hugo", "Ines", "Jonas"),
    *("Kim", "Lara", "Max", "Nina", "Omar", "Paula", "Rosa", "Sam", "Tara", "Vera"),
)
THINGS = (
    *("apples", "books", "coins", "pens", "cards", "stones", "eggs", "cups"),
    *("shells", "keys", "stamps", "tickets", "maps", "lamps", "boxes", "nails"),
)
INSTRUCTIONS = (
    "You are a careful assistant. Use a tool when you need a number.",
    "Answer with the tools you have. End with #### and the answer.",
    "Use the calculator for every sum.",
)


def _tool(name: str, description: str, argument: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


CALCULATOR = _tool("calculator", "Evaluate an arithmetic expression.", "expression")
LOOKUP = _tool("lookup", "Return the stock of an item.", "item")


@dataclass(frozen=True)
class Draw:
    """What every question is made of. Drawn whole, used in part: the order of draws makes a seed reproducible."""

    random: random.Random
    first: int  # 2..99
    second: int  # 2..99
    small: int  # 2..12
    person: str
    giver: str
    thing: str
    other_thing: str


def trajectories(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """`count` records {"messages", "tools"}; the first n of a seed are the same whatever the count."""
    generator = random.Random(seed)
    for _ in range(count):
        messages = [{"role": "system", "content": generator.choice(INSTRUCTIONS)}]
        for _ in range(generator.choice([1, 1, 2, 3])):
            messages += question(generator)
        yield {"messages": messages, "tools": [CALCULATOR, LOOKUP]}


def question(generator: random.Random) -> list[Message]:
    """The messages of one question, its tool calls and its answer; the eight kinds are equally likely."""
    kind = generator.randrange(len(KINDS))
    numbers = generator.randint(2, 99), generator.randint(2, 99), generator.randint(2, 12)
    people = generator.sample(NAMES, 2)
    things = generator.sample(THINGS, 2)
    return KINDS[kind](Draw(generator, *numbers, *people, *things))


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _says(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _uses(name: str, arguments: dict[str, str], result: str) -> list[Message]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": name, "content": result},
    ]


def _looks_up(item: str, stock: int) -> list[Message]:
    return _uses("lookup", {"item": item}, json.dumps({"item": item, "stock": stock}))


def _calculates(draw: Draw, text: str, expression: str, value: int) -> list[Message]:
    call = _uses("calculator", {"expression": expression}, str(value))
    return [_user(text), *call, _says(f"{draw.person} has {value} {draw.thing}. #### {value}")]


def _add(d: Draw) -> list[Message]:
    text = (
        f"{d.person} has {d.first} {d.thing}. {d.giver} gives {d.person} {d.second} more {d.thing}. "
        f"How many {d.thing} does {d.person} have now?"
    )
    return _calculates(d, text, f"{d.first} + {d.second}", d.first + d.second)


def _subtract(d: Draw) -> list[Message]:
    more, less = max(d.first, d.second), min(d.first, d.second)
    text = (
        f"{d.person} had {more} {d.thing} and gave {less} of them to {d.giver}. "
        f"How many {d.thing} does {d.person} have left?"
    )
    return _calculates(d, text, f"{more} - {less}", more - less)


def _multiply(d: Draw) -> list[Message]:
    text = f"{d.person} buys {d.small} boxes with {d.first} {d.thing} each. How many {d.thing} does {d.person} have?"
    return _calculates(d, text, f"{d.small} * {d.first}", d.small * d.first)


def _divide(d: Draw) -> list[Message]:
    total = d.small * d.second
    text = (
        f"{total} {d.thing} are shared equally among {d.small} children. {d.person} is one of them. "
        f"How many {d.thing} does {d.person} have?"
    )
    return _calculates(d, text, f"{total} / {d.small}", d.second)


def _add_and_multiply(d: Draw) -> list[Message]:
    text = (
        f"{d.person} has {d.first} {d.thing} and buys {d.second} bags with {d.small} {d.thing} each. "
        f"How many {d.thing} does {d.person} have now?"
    )
    return _calculates(d, text, f"{d.first} + {d.second} * {d.small}", d.first + d.second * d.small)


def _stock(d: Draw) -> list[Message]:
    stock = d.random.randint(2, 999)
    answer = _says(f"There are {stock} {d.thing} in stock. #### {stock}")
    return [_user(f"How many {d.thing} are in stock?"), *_looks_up(d.thing, stock), answer]


def _read(d: Draw) -> list[Message]:
    items = d.random.sample(THINGS, d.random.randint(3, 5))
    values = [d.random.randint(2, 99) for _ in items]
    asked = d.random.randrange(len(items))
    listed = ", ".join(f"{item}: {value}" for item, value in zip(items, values, strict=True))
    text = f"Here is a list. {listed}. What number belongs to {items[asked]}?"
    return [_user(text), _says(f"{items[asked]}: {values[asked]}. #### {values[asked]}")]


def _stock_of_two(d: Draw) -> list[Message]:
    stock, other = d.random.randint(2, 99), d.random.randint(2, 99)
    total = stock + other
    return [
        _user(f"How many {d.thing} and {d.other_thing} are in stock together?"),
        *_looks_up(d.thing, stock),
        *_looks_up(d.other_thing, other),
        *_uses("calculator", {"expression": f"{stock} + {other}"}, str(total)),
        _says(f"Together {total}. #### {total}"),
    ]


KINDS: tuple[Callable[[Draw], list[Message]], ...] = (
    *(_add, _subtract, _multiply, _divide, _add_and_multiply, _stock, _read, _stock_of_two),
)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    lines = [json.dumps(record) + "\n" for record in trajectories(options.count, options.seed)]
    options.output.write_text("".join(lines), encoding="utf-8")
    print(options.output)


if __name__ == "__main__":
    main()
