"""YAML 1.2 and key=value overrides -> RunConfig; every error names the file, the line, the key and the nearest name."""

from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from moeprune.artifacts.errors import InputError
from moeprune.config.explain import Lines, explain
from moeprune.config.schema import RunConfig

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
