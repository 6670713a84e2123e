"""Local files -> parsed values with their places. A broken line is a value with a problem, not an exception."""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz", ".json", ".json.gz", ".parquet", ".txt", ".txt.gz")
UTF8_MARK = b"\xef\xbb\xbf"
OTHER_MARKS = {b"\xff\xfe": "UTF-16 or UTF-32", b"\xfe\xff": "UTF-16", b"\x00\x00\xfe\xff": "UTF-32"}


class RecordProblem(ValueError):
    """What is wrong with one record; the intake options decide whether it is an error or only counted.

    `reason` is the short name it is counted under, `where` the field, `what` the finding.
    """

    def __init__(self, reason: str, where: str, what: str) -> None:
        self.reason, self.where, self.what = reason, where, what
        super().__init__(f"{where} {what}".strip())


def kind_of(value: Any) -> str:
    """What a JSON value is, in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    names = {dict: "an object", str: "text", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)


@dataclass(frozen=True)
class Raw:
    """One record of a file: a parsed value, or the problem that kept it from being parsed."""

    place: str  # file:line, file[index], file row index
    value: Any = None
    problem: RecordProblem | None = None
    tabular: bool = False  # from a format with columns, which fills absent fields with null


def suffix_of(path: Path) -> str:
    """The known ending of a file's name in lower case, "" when it is not one of SUFFIXES."""
    name = path.name.lower()
    return max((suffix for suffix in SUFFIXES if name.endswith(suffix)), key=len, default="")


def read_file(path: Path) -> Iterator[Raw]:
    """The records of one file; a file without any is one Raw with the problem `empty file`."""
    suffix = suffix_of(path).removesuffix(".gz")
    readers = {".json": _json, ".parquet": _parquet, ".txt": _text}
    empty = True
    for raw in readers.get(suffix, _lines)(path):
        empty = False
        yield raw
    if empty:
        yield Raw(str(path), problem=RecordProblem("empty file", "", "the file holds no record"))


def _open(path: Path) -> Any:
    return gzip.open(path, "rb") if path.name.lower().endswith(".gz") else path.open("rb")


def _lines(path: Path) -> Iterator[Raw]:
    """One JSON value a line. Lines end with LF, CRLF or CR and nothing else: JSON text may hold U+2028 or U+0085."""
    number = 0
    try:
        with _open(path) as handle:
            for chunk in handle:
                if number == 0 and (encoding := _other_encoding(chunk)):
                    yield Raw(
                        str(path), problem=RecordProblem("not UTF-8", "", f"the file is {encoding}; save it as UTF-8")
                    )
                    return
                for line in chunk.removesuffix(b"\n").removesuffix(b"\r").split(b"\r"):
                    number += 1
                    content = line.removeprefix(UTF8_MARK).strip(b" \t")
                    if content:
                        yield _parsed(content, f"{path}:{number}")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        what = f"the compressed file is damaged after line {number} ({error})"
        yield Raw(f"{path}:{number + 1}", problem=RecordProblem("damaged file", "", what))


def _other_encoding(start: bytes) -> str:
    return next((name for mark, name in OTHER_MARKS.items() if start.startswith(mark)), "")


def _parsed(content: bytes, place: str) -> Raw:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        what = f"byte {error.start} ({content[error.start]:#04x}) is not UTF-8"
        return Raw(place, problem=RecordProblem("not UTF-8", "", what))
    try:
        return Raw(place, json.loads(text))
    except json.JSONDecodeError as error:
        return Raw(place, problem=RecordProblem("broken JSON", "", f"is not JSON: {error.msg} at column {error.colno}"))
    except (ValueError, RecursionError) as error:  # a number with too many digits, brackets nested too deep
        return Raw(place, problem=RecordProblem("broken JSON", "", f"is not JSON: {error}"))


def _whole(path: Path) -> str | Raw:
    """The file's text without a byte order mark, or a Raw that says why there is none."""
    try:
        with _open(path) as handle:
            data = handle.read()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        return Raw(str(path), problem=RecordProblem("damaged file", "", f"the compressed file is damaged ({error})"))
    if encoding := _other_encoding(data):
        return Raw(str(path), problem=RecordProblem("not UTF-8", "", f"the file is {encoding}; save it as UTF-8"))
    try:
        return data.removeprefix(UTF8_MARK).decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        what = f"byte {error.start} ({data[error.start]:#04x}) is not UTF-8"
        return Raw(f"{path}:{line}", problem=RecordProblem("not UTF-8", "", what))


def _json(path: Path) -> Iterator[Raw]:
    """A list of records, one record, or (as some tools name them) one record a line."""
    text = _whole(path)
    if isinstance(text, Raw):
        yield text
        return
    if not text.strip():
        return
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        first, _, rest = text.lstrip().partition("\n")
        if error.msg == "Extra data" and rest.strip() and _is_object(first):
            yield from _lines(path)
        else:
            what = f"is not JSON: {error.msg} at column {error.colno}"
            yield Raw(f"{path}:{error.lineno}", problem=RecordProblem("broken JSON", "", what))
        return
    except (ValueError, RecursionError) as error:
        yield Raw(str(path), problem=RecordProblem("broken JSON", "", f"is not JSON: {error}"))
        return
    if isinstance(value, list):
        yield from (Raw(f"{path}[{index}]", item) for index, item in enumerate(value))
    else:
        yield Raw(str(path), value)


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _parquet(path: Path) -> Iterator[Raw]:
    import pyarrow
    import pyarrow.parquet

    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=256):
                for value in batch.to_pylist():
                    yield Raw(f"{path} row {row}", value, tabular=True)
                    row += 1
    except (pyarrow.ArrowException, OSError) as error:
        what = f"is not a readable parquet file ({error})"
        yield Raw(f"{path} row {row}", problem=RecordProblem("damaged file", "", what))


def _text(path: Path) -> Iterator[Raw]:
    """The whole file is one text, line endings as they are."""
    text = _whole(path)
    if isinstance(text, Raw):
        yield text
    elif text.strip():
        yield Raw(str(path), {"text": text})
