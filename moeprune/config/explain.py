"""One line for each validation problem: file, line, key, what is wrong, and the nearest name that exists."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

Path = tuple[str | int, ...]
Lines = dict[Path, int]  # key path -> line in the file


def explain(model: type[BaseModel], problem: Mapping[str, Any], *, place: str, lines: Lines) -> str:
    """The problem (one entry of pydantic's `errors()`) in a line a person can act on."""
    keys, candidates = _walk(model, problem["loc"])
    line = next((lines[keys[:depth]] for depth in range(len(keys), 0, -1) if keys[:depth] in lines), None)
    where = f"{place}:{line}" if line else place
    key = ".".join(map(str, keys)) or "the config"
    if problem["type"] == "extra_forbidden":
        names = sorted({name for candidate in candidates for name in candidate.model_fields})
        return f"{where}: unknown key {key}; {_nearest(str(keys[-1]), names, 'known keys')}"
    if problem["type"].startswith("union_tag"):
        tags = [tag.strip(" '") for tag in str(problem.get("ctx", {}).get("expected_tags", "")).split(",")]
        tag = str(problem.get("ctx", {}).get("tag", ""))
        return f"{where}: {key}.name: {tag!r} is not known; {_nearest(tag, tags, 'known names')}"
    given = problem.get("input")
    shown = f" (given: {given!r})" if given is None or isinstance(given, str | int | float) else ""
    if problem["type"] == "missing":
        shown = ""
    return f"{where}: {key}: {problem['msg'].removeprefix('Value error, ')}{shown}"


def _nearest(name: str, names: Sequence[str], label: str) -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"{label}: {', '.join(names)}"


def _walk(model: type[BaseModel], location: Sequence[str | int]) -> tuple[Path, list[type[BaseModel]]]:
    """The keys as they stand in the file, and the models whose fields the last key is looked up in.

    pydantic's location also holds the tags of discriminated unions, which are no keys.
    """
    candidates, keys = [model], []
    for depth, part in enumerate(location):
        is_last = depth == len(location) - 1
        if len(candidates) > 1 and not isinstance(part, int) and not is_last:
            tagged = [m for m in candidates if _tag(m) == part]
            if tagged or not any(part in m.model_fields for m in candidates):
                candidates = tagged or candidates
                continue
        keys.append(part)
        if not isinstance(part, int) and not is_last:
            candidates = [
                s for m in candidates if part in m.model_fields for s in _models(m.model_fields[part].annotation)
            ]
    return tuple(keys), candidates


def _tag(model: type[BaseModel]) -> Any:
    return model.model_fields["name"].default if "name" in model.model_fields else None


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The option classes that an annotation may hold, through unions, tuples and Annotated."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in getattr(annotation, "__args__", ()) for model in _models(argument)]
