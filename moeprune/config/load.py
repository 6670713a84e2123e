"""YAML 1.2 and key=value overrides -> RunConfig.

An error has one line for each problem: file, line, key, what is wrong, and the nearest name that exists.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from moeprune.artifacts.errors import InputError
from moeprune.config.schema import RunConfig

KeyPath = tuple[str | int, ...]
Lines = dict[KeyPath, int]  # key path -> line in the file


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


def _walk(model: type[BaseModel], location: Sequence[str | int]) -> tuple[KeyPath, list[type[BaseModel]]]:
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


Model = TypeVar("Model", bound=BaseModel)


def load_run(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The validated config of a YAML file with `key=value` overrides applied.

    Raises InputError with file, line, key and the nearest valid name.
    """
    value, lines = read_yaml(Path(path))
    return validate(RunConfig, with_overrides(value, overrides), place=str(path), lines=lines)


def read_yaml(path: Path) -> tuple[dict[str, Any], Lines]:
    """The mapping in a YAML file as plain Python values, and the line of every key."""
    if not path.is_file():
        raise InputError(f"{path}: no such config file")
    try:
        value = YAML(typ="rt").load(path.read_text(encoding="utf-8"))
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise InputError(f"{path}:{line}: {(error.problem or str(error)).splitlines()[0]}") from error
    except (YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not readable as YAML ({error})") from error
    if not isinstance(value, CommentedMap):
        raise InputError(f"{path}: expected a mapping of sections such as `calibration:`, found {type(value).__name__}")
    lines: Lines = {}
    _collect_lines(value, (), lines)
    return _plain(value), lines


def with_overrides(value: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """`value` with each `a.b.c=yaml` set; list items are addressed by their number. Raises InputError on bad syntax."""
    result = _plain(value)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            raise InputError(f"override {override!r}: expected key=value, such as selection.budget.prune=0.25")
        _set(result, key.strip().split("."), parse_scalar(text), override)
    return result


def parse_scalar(text: str) -> Any:
    """The value of a piece of YAML 1.2: 0.5 is a number, on is a word, [a, b] a list, nothing is null."""
    try:
        return _plain(YAML(typ="rt").load(StringIO(text))) if text.strip() else None
    except YAMLError as error:
        raise InputError(f"{text!r} is not a YAML value") from error


def validate(model: type[Model], value: Any, *, place: str, lines: Lines | None = None) -> Model:
    """`model` built from `value`. Raises InputError that lists every problem with its line and key."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        problems = [explain(model, problem, place=place, lines=lines or {}) for problem in error.errors()]
        raise InputError("\n".join(dict.fromkeys(problems))) from error


def dump_yaml(config: BaseModel) -> str:
    """The resolved config as YAML that `load_run` reads back to the same config."""
    out = StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.dump(config.model_dump(mode="json"), out)
    return out.getvalue()


def _collect_lines(node: Any, path: tuple[str | int, ...], lines: Lines) -> None:
    if isinstance(node, CommentedMap):
        for key, child in node.items():
            lines[*path, key] = node.lc.key(key)[0] + 1
            _collect_lines(child, (*path, key), lines)
    elif isinstance(node, CommentedSeq):
        for number, child in enumerate(node):
            lines[*path, number] = node.lc.item(number)[0] + 1
            _collect_lines(child, (*path, number), lines)


def _plain(node: Any) -> Any:
    """Plain dicts, lists, numbers and strings instead of ruamel's annotated ones."""
    if isinstance(node, Mapping):
        return {str(key): _plain(child) for key, child in node.items()}
    if isinstance(node, list | tuple):
        return [_plain(child) for child in node]
    if isinstance(node, bool) or node is None:
        return node
    for kind in (int, float, str):
        if isinstance(node, kind):
            return kind(node)
    return node


def _set(value: Any, keys: list[str], new: Any, override: str) -> None:
    """Set one dotted key in nested dicts and lists, making the sections that are missing."""
    for depth, key in enumerate(keys[:-1]):
        value = _descend(value, key, ".".join(keys[:depth]), override)
    place, last = ".".join(keys[:-1]), keys[-1]
    if isinstance(value, list):
        value[_item(value, last, place, override)] = new
    elif isinstance(value, dict):
        value[last] = new
    else:
        raise InputError(f"override {override!r}: {place} is a value, not a section")


def _descend(value: Any, key: str, place: str, override: str) -> Any:
    if isinstance(value, list):
        return value[_item(value, key, place, override)]
    if not isinstance(value, dict):
        raise InputError(f"override {override!r}: {place} is a value, not a section")
    if value.get(key) is None:
        value[key] = {}
    return value[key]


def _item(value: list[Any], key: str, place: str, override: str) -> int:
    if not key.isdigit() or int(key) >= len(value):
        raise InputError(f"override {override!r}: {place} has items 0..{len(value) - 1}, not {key!r}")
    return int(key)
