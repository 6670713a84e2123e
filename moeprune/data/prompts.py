"""What a model is asked when it writes trajectories of its own: the words of the user, and nothing after them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moeprune.data.manifest import Tally
from moeprune.data.options import Domain, Intake
from moeprune.data.problems import RecordProblem
from moeprune.data.records import normalise
from moeprune.data.sources import open_source


@dataclass(frozen=True)
class Prompt:
    """Either a script of user messages, played one after the other, or a text to go on with."""

    place: str
    opening: tuple[dict[str, Any], ...] = ()  # system messages before the first question
    questions: tuple[dict[str, Any], ...] = ()  # user messages
    results: tuple[tuple[dict[str, Any], ...], ...] = ()  # of each question, the tool messages the record has
    tools: tuple[dict[str, Any], ...] = ()
    text: str = ""


def load_prompts(domain: Domain, intake: Intake | None = None) -> tuple[list[Prompt], list[str]]:
    """The prompts behind `domain.path` in the order of its files, and warnings about records left out.

    A record is a chat (its user messages are played, its answers forgotten), {"prompt": text or messages}, or
    {"text"}: a beginning that the model goes on with. Raises InputError when there is none.
    """
    intake = intake or Intake()
    tally = Tally(domain, intake, "all")
    prompts = []
    for raw in open_source(domain).records:
        tally.read()
        try:
            if raw.problem:
                raise raw.problem
            prompts.append(_prompt(raw.value, raw.place, domain.fields or {}, tabular=raw.tabular))
        except RecordProblem as problem:
            tally.problem(problem, raw.place)
    if not prompts:
        raise tally.nothing_usable()
    return prompts, tally.skip_warnings()


def _prompt(value: Any, place: str, fields: Mapping[Any, str], *, tabular: bool) -> Prompt:
    asked = fields.get("prompt", "prompt")
    if isinstance(value, dict) and asked in value and not {"messages", "conversations"} & set(value):
        prompt = value[asked]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        value = {"messages": messages, **({"tools": value["tools"]} if "tools" in value else {})}
        fields = {ours: theirs for ours, theirs in fields.items() if ours in ("role", "content")}
    record = normalise(value, place, fields=fields, tabular=tabular)
    if record.kind == "text":
        return Prompt(place, text=record.text)
    if record.kind != "messages":
        raise RecordProblem("no question", "", "is neither a chat, a prompt nor a text")
    at = [index for index, message in enumerate(record.messages) if message["role"] == "user"]
    if not at:
        raise RecordProblem("no question", "messages", "has no user message")
    ends = [*at[1:], len(record.messages)]
    segments = [record.messages[start:end] for start, end in zip(at, ends)]
    return Prompt(
        place,
        opening=tuple(message for message in record.messages[: at[0]] if message["role"] != "assistant"),
        questions=tuple(segment[0] for segment in segments),
        results=tuple(tuple(message for message in segment if message["role"] == "tool") for segment in segments),
        tools=record.tools or (),
    )
