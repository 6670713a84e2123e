"""Records as people store them -> records as a chat template takes them, with every change counted.

The changes: tool arguments in a string become the object, null or missing content becomes "", text parts are joined,
lists kept as JSON text are parsed, ShareGPT turns get role and content, nulls that a table format added are removed.
Nothing else is added, dropped or reordered. Near-duplicates of an earlier trajectory are left out on request: they
would only count its experts twice.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from moeprune.artifacts.errors import InputError
from moeprune.data.messages import as_list, conversation, normalise_messages
from moeprune.data.readers import RecordProblem, kind_of

Kind = Literal["messages", "completion", "text", "ids"]
SHAPES = ("messages", "conversations", "prompt", "text", "input_ids")
SHINGLE = 5  # words
PERMUTATIONS = 128
MISSED, SUPERFLUOUS = 0.95, 0.05  # weights of the two errors of a sketch; the second costs only an exact comparison


@dataclass(frozen=True)
class Record:
    """One trajectory before tokens. Of the last four groups of fields only those of its kind are set."""

    place: str  # file and line, for messages to people
    kind: Kind
    changes: Counter[str] = field(default_factory=Counter)
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] | None = None  # an empty list stays one: templates may tell it from none
    completion_from: int | None = None  # index of the first message that answers; None: after the last user message
    text: str = ""
    prompt_length: int = 0  # characters of `text` that are the prompt
    ids: tuple[int, ...] = ()

    def digest(self, seed: int) -> str:
        """sha256 of the content with a seed: an order of records that no file or line order can change."""
        content = [self.kind, self.messages, self.tools, self.completion_from, self.text, self.prompt_length, self.ids]
        try:
            encoded = json.dumps([seed, *content], ensure_ascii=False, default=str).encode("utf-8")
        except UnicodeEncodeError as error:
            raise RecordProblem(
                "bad text", "", f"has an unpaired surrogate, \\u{ord(error.object[error.start]):x}"
            ) from error
        return hashlib.sha256(encoded).hexdigest()

    def plain(self) -> dict[str, Any]:
        """The record as a JSON object: messages and tools, or text, or input_ids."""
        if self.kind == "messages":
            value: dict[str, Any] = {"messages": list(self.messages)}
            return value | {"tools": list(self.tools)} if self.tools is not None else value
        if self.kind == "ids":
            return {"input_ids": list(self.ids)}
        return {"text": self.text}


def normalise(value: Any, place: str, *, fields: Mapping[Any, str] | None = None, tabular: bool = False) -> Record:
    """The record behind a parsed value. Raises RecordProblem with the field and the reason.

    `fields` maps our field names to the record's. `tabular` says that the value comes from a format with columns,
    which stores a field that only other rows have as null.
    """
    if not isinstance(value, dict):
        raise RecordProblem("not an object", "", f"is {kind_of(value)}, not a JSON object")
    changes: Counter[str] = Counter()
    if tabular:
        value = _without_nulls(value, changes)
    shape, value = _shape(value, fields or {})
    if shape in ("messages", "conversations"):
        return _chat(value, shape, place, fields or {}, changes)
    if shape == "prompt":
        return _completion(value, place, fields or {}, changes)
    if shape == "text":
        return Record(place, "text", changes, text=_text(value["text"], "text"))
    return Record(place, "ids", changes, ids=_ids(value, changes))


def _shape(value: dict[str, Any], fields: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """The name of the shape, and the record under our field names; a mapped field decides before the others."""
    mapped = {
        ours: _inside(value, theirs) for ours, theirs in fields.items() if ours not in ("role", "content", "tools")
    }
    renamed = {**value, **mapped}
    if "tools" in fields:
        try:
            renamed["tools"] = _inside(value, fields["tools"])
        except RecordProblem:  # a trajectory without tools
            renamed.pop("tools", None)
    for candidates in (mapped, renamed):
        for shape in SHAPES:
            if shape in candidates:
                return shape, renamed
    known = ", ".join((*SHAPES[:2], "prompt and completion", *SHAPES[3:]))
    raise RecordProblem(
        "no known field", "", f"has none of {known}; it has {', '.join(value) or 'no field'} (see `fields`)"
    )


def _inside(value: Any, path: str) -> Any:
    for key in [path] if isinstance(value, dict) and path in value else path.split("."):
        if not isinstance(value, dict) or key not in value:
            raise RecordProblem("no known field", path, "is not there")
        value = value[key]
    return value


def _chat(value: dict[str, Any], shape: str, place: str, fields: Mapping[str, str], changes: Counter[str]) -> Record:
    turns = as_list(value[shape], shape, changes)
    if shape == "conversations":
        turns = conversation(turns, value.get("system"), changes)
    messages = normalise_messages(turns, shape, fields, changes)
    return Record(place, "messages", changes, messages=messages, tools=_tools(value, changes))


def _tools(value: dict[str, Any], changes: Counter[str]) -> tuple[dict[str, Any], ...] | None:
    if value.get("tools") in (None, ""):
        return None
    tools = as_list(value["tools"], "tools", changes)
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise RecordProblem("bad tools", f"tools[{index}]", f"is {kind_of(tool)}, not a JSON object")
    return tuple(tools)


def _completion(value: dict[str, Any], place: str, fields: Mapping[str, str], changes: Counter[str]) -> Record:
    if "completion" not in value:
        raise RecordProblem("no known field", "completion", "is missing beside `prompt`")
    prompt, completion = value["prompt"], value["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        before = normalise_messages(prompt, "prompt", fields, changes)
        after = normalise_messages(completion, "completion", fields, changes)
        tools = _tools(value, changes)
        return Record(place, "messages", changes, messages=before + after, tools=tools, completion_from=len(before))
    prompt, completion = _text(prompt, "prompt"), _text(completion, "completion")
    return Record(place, "completion", changes, text=prompt + completion, prompt_length=len(prompt))


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise RecordProblem("bad text", name, f"is {kind_of(value)}, not text")
    if not value:
        raise RecordProblem("bad text", name, "is empty")
    return value


def _ids(value: dict[str, Any], changes: Counter[str]) -> tuple[int, ...]:
    """The real tokens of a pre-tokenised record; only its attention_mask marks padding, never an id."""
    ids, mask = value["input_ids"], value.get("attention_mask")
    if not isinstance(ids, list) or not ids:
        raise RecordProblem("bad ids", "input_ids", f"is {kind_of(ids)}, not a list of token ids")
    for index, item in enumerate(ids):
        if type(item) is not int or item < 0:
            raise RecordProblem("bad ids", f"input_ids[{index}]", f"is {item!r}, not a token id")
    if mask is None:
        return tuple(ids)
    if not isinstance(mask, list) or len(mask) != len(ids) or any(item not in (0, 1) for item in mask):
        raise RecordProblem("bad ids", "attention_mask", f"is not a list of {len(ids)} zeros and ones")
    real = tuple(item for item, keep in zip(ids, mask) if keep)
    if len(real) < len(ids):
        changes["padding removed"] += len(ids) - len(real)
    if not real:
        raise RecordProblem("bad ids", "attention_mask", "marks every token as padding")
    return real


def _without_nulls(value: Any, changes: Counter[str]) -> Any:
    if isinstance(value, dict):
        kept = {key: _without_nulls(item, changes) for key, item in value.items() if item is not None}
        if len(kept) < len(value):
            changes["table nulls removed"] += len(value) - len(kept)
        return kept
    if isinstance(value, list):
        return [_without_nulls(item, changes) for item in value]
    return value


def without_near_duplicates(
    records: Iterable[Record], threshold: float, *, on_drop: Callable[[], None]
) -> Iterator[Record]:
    """The records of which no earlier one shares `threshold` or more of its runs of SHINGLE words.

    The share is |both| / |either| of the sets of runs, computed exactly for the candidates that MinHash and
    locality-sensitive hashing propose (datasketch). `on_drop` is called for every record left out.
    """
    try:
        from datasketch import MinHash, MinHashLSH
    except ImportError as error:
        raise InputError(
            "calibration.near_duplicates needs the package datasketch; pip install 'moeprune[dedup]', or leave it out"
        ) from error
    index = MinHashLSH(threshold=threshold / 2, num_perm=PERMUTATIONS, weights=(SUPERFLUOUS, MISSED))
    kept: list[frozenset[str]] = []
    for record in records:
        runs = _runs(record)
        sketch = MinHash(num_perm=PERMUTATIONS, seed=1)
        sketch.update_batch([run.encode("utf-8") for run in sorted(runs)])
        if any(len(runs & kept[near]) >= threshold * len(runs | kept[near]) for near in index.query(sketch)):
            on_drop()
            continue
        index.insert(len(kept), sketch)
        kept.append(runs)
        yield record


def _runs(record: Record) -> frozenset[str]:
    """All runs of SHINGLE words; the whole record where it has fewer words."""
    words = list(map(str, record.ids)) or " ".join(_words(record.messages or record.text)).split()
    if len(words) <= SHINGLE:
        return frozenset([" ".join(words)])
    return frozenset(" ".join(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1))


def _words(value: Any) -> Iterator[str]:
    """Every text and number in a record, in order, without the names of fields."""
    if isinstance(value, dict):
        for item in value.values():
            yield from _words(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _words(item)
    else:
        yield str(value)
