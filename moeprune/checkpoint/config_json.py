"""config.json edited as text: only the values that pruning changes differ from the source, to the last space."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from json.decoder import JSONDecoder, scanstring  # type: ignore[attr-defined]
from typing import Any

from moeprune.artifacts.errors import InputError
from moeprune.models.families import Family
from moeprune.models.family import COUNT_KEYS, MTP_KEYS, TEXT_SECTIONS

Path = tuple[str, ...]  # keys from the top of the document to a value
Edits = dict[Path, Any]

QUANTIZATION_KEYS = ("quantization_config", "compression_config")
# Beside config.json, some quantisers write their module lists into files of their own.
QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json", "quantization_config.json")


def text_sections(config: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """The document and every section of it on the path to the language model, outermost first."""
    yield path, config
    for key in (*TEXT_SECTIONS, "ffn_config"):  # of DBRX, which counts experts there
        if isinstance(config.get(key), dict):
            yield from text_sections(config[key], (*path, key))


def count_edits(config: Mapping[str, Any], family: Family, before: int, after: int) -> tuple[Edits, list[str]]:
    """Edits that set every expert count of `before` to `after`, and warnings about counts that say something else.

    A config that leaves the count to the class's default gets the family's first key.
    Raises InputError for a count per layer.
    """
    edits: Edits = {}
    warnings = []
    sections = list(text_sections(config))
    for path, section in sections:
        for key in dict.fromkeys((*family.count_keys, *COUNT_KEYS)):
            value = section.get(key)
            place = ".".join((*path, key))
            if isinstance(value, list):
                raise InputError(
                    f"config.json: {place} is a list, one count a layer; only one count for all is supported"
                )
            if value == before:
                edits[*path, key] = after
            elif isinstance(value, int):
                warnings.append(f"config.json: {place} is {value} while the model has {before} experts; left as it is")
    if not edits:
        edits[*sections[-1][0], family.count_keys[0]] = after
    return edits, warnings


def with_expert_count(config: dict[str, Any], family: Family, before: int, after: int) -> dict[str, Any]:
    """The parsed config with another number of experts (`config` itself is changed)."""
    for path, value in count_edits(config, family, before, after)[0].items():
        _section(config, path)[path[-1]] = value
    return config


def mtp_edits(config: Mapping[str, Any], family: Family) -> Edits:
    """Edits that set every count of multi-token-prediction layers to 0."""
    keys = dict.fromkeys((*([family.mtp_layers_key] if family.mtp_layers_key else []), *MTP_KEYS))
    return {(*path, key): 0 for path, section in text_sections(config) for key in keys if section.get(key)}


def quantization_edits(config: Mapping[str, Any], renamed: Callable[[str], str | None]) -> Edits:
    """Edits to the module lists and tables of quantization_config; `renamed` gives a name's new form, None: drop it."""
    edits: Edits = {}
    for path, section in text_sections(config):
        for key in QUANTIZATION_KEYS:
            for name, value in (section.get(key) or {}).items():
                new = renamed_modules(value, renamed)
                if new != value:
                    edits[*path, key, name] = new
    return edits


def renamed_modules(value: Any, renamed: Callable[[str], str | None]) -> Any:
    """A JSON value with the strings of its lists and the keys of its tables renamed or left out."""
    if isinstance(value, dict):
        names = {key: renamed(key) for key in value}
        return {names[key]: renamed_modules(item, renamed) for key, item in value.items() if names[key] is not None}
    if isinstance(value, list):
        items = [renamed(item) if isinstance(item, str) else renamed_modules(item, renamed) for item in value]
        return [item for item in items if item is not None]
    return value


def edit_text(text: str, edits: Edits) -> str:
    """The document with the values at the paths replaced, and a value added where its path ends in a new key."""
    spans: dict[Path, tuple[int, int]] = {}
    _spans(text, 0, (), spans)
    replacements = []
    for path, value in edits.items():
        if path in spans:
            start, stop = spans[path]
            replacements.append((start, stop, _dump(value, _indent(text, start))))
        else:
            start = spans[path[:-1]][0] + 1
            space = re.compile(r"\s*").match(text, start).group()  # type: ignore[union-attr]
            new = _dump(value, space.rpartition("\n")[2])
            replacements.append((start, start, f"{space}{json.dumps(path[-1])}: {new},"))
    for start, stop, new in sorted(replacements, reverse=True):
        text = text[:start] + new + text[stop:]
    return text


def _dump(value: Any, indent: str) -> str:
    if not isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    return json.dumps(value, indent=2, ensure_ascii=False).replace("\n", "\n" + indent)


def _indent(text: str, position: int) -> str:
    """The white space that the line of a position begins with."""
    line = text.rfind("\n", 0, position) + 1
    return re.compile(r"[ \t]*").match(text, line).group()  # type: ignore[union-attr]


def _spans(text: str, position: int, path: Path, spans: dict[Path, tuple[int, int]]) -> int:
    """Where every value that is reached through objects stands; returns the position after the value at `position`."""
    start = position = _skip(text, position)
    if text[position] == "{":
        position = _skip(text, position + 1)
        while text[position] != "}":
            key, position = scanstring(text, position + 1)
            position = _spans(text, _skip(text, position) + 1, (*path, key), spans)
            position = _skip(text, position)
            if text[position] == ",":
                position = _skip(text, position + 1)
        position += 1
    else:
        _, position = JSONDecoder().raw_decode(text, position)
    spans[path] = (start, position)
    return position


def _skip(text: str, position: int) -> int:
    while text[position] in " \t\r\n":
        position += 1
    return position


def _section(config: dict[str, Any], path: Path) -> dict[str, Any]:
    for key in path[:-1]:
        config = config[key]
    return config
