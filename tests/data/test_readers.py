"""Nasty files: the right records, or the right place and reason, for each."""

import gc
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from moeprune.artifacts.errors import InputError
from moeprune.data.options import Domain, Intake
from moeprune.data.readers import Raw, read_file
from moeprune.data.trajectories import load_tokens

GOOD = b'{"text": "some words"}'
BOM = b"\xef\xbb\xbf"


@pytest.fixture(autouse=True)
def no_old_garbage() -> None:
    """Nothing left to finalise: a collection in the depth of nested brackets would find no stack for it."""
    gc.collect()


def found(path: Path) -> list[tuple[str, Any]]:
    """(what stands after the path in the place, the value or the reason of the problem) of every record."""

    def outcome(raw: Raw) -> Any:
        return raw.problem.reason if raw.problem else raw.value

    return [(raw.place.removeprefix(str(path)), outcome(raw)) for raw in read_file(path)]


TEXT = {"text": "some words"}
NASTY_LINES: dict[str, tuple[bytes, list[tuple[str, Any]]]] = {
    "no newline at the end": (GOOD + b"\n" + GOOD, [(":1", TEXT), (":2", TEXT)]),
    "CRLF": (GOOD + b"\r\n" + GOOD + b"\r\n", [(":1", TEXT), (":2", TEXT)]),
    "CR alone": (GOOD + b"\r" + GOOD + b"\r", [(":1", TEXT), (":2", TEXT)]),
    "blank lines": (b"\n\n" + GOOD + b"\n \t\n" + GOOD + b"\n\n", [(":3", TEXT), (":5", TEXT)]),
    "UTF-8 mark": (BOM + GOOD + b"\n", [(":1", TEXT)]),
    "UTF-8 mark in the middle": (GOOD + b"\n" + BOM + GOOD + b"\n", [(":1", TEXT), (":2", TEXT)]),
    "separators inside text": (
        '{"text": "a\u2028b\u2029c\u0085d\u000be\u001cf"}'.replace("\u000b", "\\u000b")
        .replace("\u001c", "\\u001c")
        .encode(),
        [(":1", {"text": "a\u2028b\u2029c\u0085d\u000be\u001cf"})],
    ),
    "cut off line": (GOOD + b'\n{"text": "some wo', [(":1", TEXT), (":2", "broken JSON")]),
    "two objects on a line": (GOOD + GOOD + b"\n", [(":1", "broken JSON")]),
    "not UTF-8": (GOOD + b'\n{"text": "caf\xe9"}\n' + GOOD, [(":1", TEXT), (":2", "not UTF-8"), (":3", TEXT)]),
    "UTF-16": ('{"text": "a"}\n'.encode("utf-16"), [("", "not UTF-8")]),
    "single quotes": (b"{'text': 'a'}\n", [(":1", "broken JSON")]),
    "type changes": (GOOD + b'\n["text"]\n7\nnull\n', [(":1", TEXT), (":2", ["text"]), (":3", 7), (":4", None)]),
    "brackets without end": (b"[" * 200_000 + b"\n", [(":1", "broken JSON")]),
    "a number without end": (b'{"text": ' + b"9" * 5000 + b"}\n", [(":1", "broken JSON")]),
    "nothing": (b"", [("", "empty file")]),
    "only blanks": (b"\n \n\r\n", [("", "empty file")]),
    "zero bytes": (b"\0\0\0\0\n", [(":1", "broken JSON")]),
}


@pytest.mark.parametrize("name", NASTY_LINES)
@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_lines(tmp_path: Path, name: str, suffix: str) -> None:
    data, expected = NASTY_LINES[name]
    path = tmp_path / f"x.{suffix}"
    path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    assert found(path) == expected


@pytest.mark.parametrize("name", NASTY_LINES)
def test_intake_stops_at_the_place_or_skips_and_counts(tmp_path: Path, tokenizer: Any, name: str) -> None:
    data, expected = NASTY_LINES[name]
    path = tmp_path / "x.jsonl"
    path.write_bytes(data)
    good = sum(isinstance(value, dict) for _, value in expected)
    bad = [(place, value) for place, value in expected if not isinstance(value, dict)]
    domain = Domain(name="d", path=str(path))
    if bad:
        with pytest.raises(InputError) as caught:
            load_tokens([domain], tokenizer)
        assert str(caught.value).startswith(f"{path}{bad[0][0]}: ")
        assert "on_bad_record=skip" in str(caught.value)
    if good:
        told = load_tokens([domain], tokenizer, Intake(on_bad_record="skip")).manifest["d"]
        assert (told["records_read"], told["records_used"]) == (len(expected), good)
        assert sum(told["records_skipped"].values()) == len(bad)
    else:
        with pytest.raises(InputError, match="no usable record"):
            load_tokens([domain], tokenizer, Intake(on_bad_record="skip"))


def test_a_cut_off_gzip_keeps_what_came_before(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    lines = "".join(json.dumps({"text": f"words {i} {hash(str(i))}"}) + "\n" for i in range(5000)).encode()
    whole = gzip.compress(lines)
    path.write_bytes(whole[: len(whole) // 2])
    records = found(path)
    assert len(records) > 100
    assert records[-1] == (f":{len(records)}", "damaged file")
    path.write_bytes(b"no gzip at all")
    assert found(path) == [(":1", "damaged file")]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'[{"text": "a"}, {"text": "b"}]', [("[0]", {"text": "a"}), ("[1]", {"text": "b"})]),
        (BOM + b'{"text": "a"}', [("", {"text": "a"})]),
        (b'{"text": "a"}\n{"text": "b"}\n', [(":1", {"text": "a"}), (":2", {"text": "b"})]),
        (b'[\n{"text": "a"},\n{"text" "b"}]', [(":3", "broken JSON")]),
        (b"[]", [("", "empty file")]),
        (b"  \n", [("", "empty file")]),
        ('{"text": "a"}'.encode("utf-16"), [("", "not UTF-8")]),
        (b'{"text":\n "caf\xe9"}', [(":2", "not UTF-8")]),
    ],
)
def test_json(tmp_path: Path, data: bytes, expected: list[tuple[str, Any]]) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(data)
    assert found(path) == expected


def test_txt_is_one_text_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "x.TXT"
    path.write_bytes(BOM + "line\r\nline\u2028 end\n".encode())
    assert found(path) == [("", {"text": "line\r\nline\u2028 end\n"})]
    path.write_bytes(b" \n")
    assert found(path) == [("", "empty file")]


def test_parquet(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"text": "a"}, {"text": None}]), path)
    assert found(path) == [(" row 0", {"text": "a"}), (" row 1", {"text": None})]
    path.write_bytes(path.read_bytes()[:-20])
    assert found(path) == [(" row 0", "damaged file")]
