"""Every kind of path gives its records, and every wrong path says so before anything is read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moeprune.artifacts.errors import InputError
from moeprune.data.options import Domain, Intake
from moeprune.data.sources import open_source
from moeprune.data.trajectories import TokenSet, load_records, load_tokens
from tests.data.conftest import CALCULATOR, called
from tests.data.test_trajectories import content

ASK = {"role": "user", "content": "What is 2 + 3?"}
TRACES = [
    {
        "messages": [ASK, called({"expression": "2 + 3"}, content=""), {"role": "tool", "content": "5"}],
        "tools": [CALCULATOR],
    },
    {"messages": [ASK, {"role": "assistant", "content": "5"}], "tools": [CALCULATOR]},
    {"messages": [{**ASK, "content": "Hello"}, {"role": "assistant", "content": ""}], "tools": [CALCULATOR]},
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `datasets` prepares goes into a temporary folder."""
    import datasets

    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    datasets.disable_progress_bars()


def texts(path: str, **options: Any) -> list[Any]:
    return [raw.value["text"] for raw in open_source(Domain(name="d", path=path, **options)).records]


def tokens(tokenizer: Any, path: str | Path, **options: Any) -> TokenSet:
    return load_tokens([Domain(name="d", path=str(path), **options)], tokenizer)


def test_folders_and_globs(write: Callable[..., str], tmp_path: Path) -> None:
    write([{"text": "b"}], "many/sub/b.jsonl")
    write([{"text": "a"}], "many/a.jsonl")
    (tmp_path / "many" / "c.txt").write_text("c")
    (tmp_path / "many" / "README.md").write_text("no data")
    (tmp_path / "many" / ".hidden.txt").write_text("no data")
    assert texts(str(tmp_path / "many")) == ["a", "c", "b"]
    source = open_source(Domain(name="d", path=str(tmp_path / "many")))
    assert [Path(name).name for name in source.ignored] == ["README.md"]
    assert texts(str(tmp_path / "many" / "*.jsonl")) == ["a"]
    assert texts(str(tmp_path / "many" / "**" / "*.jsonl")) == ["a", "b"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{tmp}/none.jsonl", "does not exist"),
        ("none.jsonl", "does not exist"),
        ("./none", "does not exist"),
        ("{tmp}/*.jsonl", "matches no file"),
        ("{tmp}/empty", "holds no file with a known ending"),
        ("{tmp}/x.csv", "no known ending"),
        ("reference:poetry", "there are prose, python, c, json, math, agent"),
        ("reference:", "there are prose"),
        ("nobody/nothing", "neither a local path nor a dataset"),
    ],
)
def test_wrong_paths(tmp_path: Path, tokenizer: Any, path: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.csv").write_text("a,b")
    path = path.replace("{tmp}", str(tmp_path))
    with pytest.raises(InputError, match=message) as caught:
        tokens(tokenizer, path)
    assert str(caught.value).startswith("domain d: path ")


def test_split_of_a_file_is_an_error(write: Callable[..., str]) -> None:
    with pytest.raises(InputError, match="belong to datasets"):
        texts(write([{"text": "a"}]), split="train")


def test_every_format_gives_the_same_tokens(tokenizer: Any, write: Callable[..., str], tmp_path: Path) -> None:
    import datasets
    import pyarrow
    import pyarrow.parquet

    expected = tokens(tokenizer, write(TRACES))
    (tmp_path / "x.json").write_text(json.dumps(TRACES))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(TRACES), tmp_path / "x.parquet")
    rows = datasets.Dataset.from_list(TRACES)
    rows.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(tmp_path / "splits")
    for path, options in [
        ("x.json", {}),
        ("x.parquet", {}),
        ("saved", {}),
        ("splits", {"split": "train"}),
    ]:
        found = tokens(tokenizer, tmp_path / path, **options)
        assert content(found) == content(expected), path
    table = tokens(tokenizer, tmp_path / "x.parquet").manifest["d"]
    assert table["changes"]["table nulls removed"] > 0
    assert load_records(Domain(name="d", path=str(tmp_path / "saved"))) == TRACES


@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_as_a_dataset(tokenizer: Any, write: Callable[..., str], tmp_path: Path, streaming: bool) -> None:
    write([{"text": f"train {i}"} for i in range(200)], "set/train.jsonl")
    write([{"text": "test"}], "set/test.jsonl")
    options = {"split": "train", "streaming": streaming}
    assert texts(str(tmp_path / "set"), **options) == [f"train {i}" for i in range(200)]
    assert texts(str(tmp_path / "set"), split="test", streaming=streaming) == ["test"]
    limited = tokens(tokenizer, tmp_path / "set", tokens=20, **options)
    assert limited.tokens == 20
    assert limited.manifest["d"]["records_read"] == (64 if streaming else 200)  # a stream is read as far as needed
    with pytest.raises(InputError, match="split"):
        tokens(tokenizer, tmp_path / "set", split="validation", streaming=streaming)


def test_a_dataset_with_several_splits_asks_for_one(tmp_path: Path, tokenizer: Any) -> None:
    import datasets

    rows = datasets.Dataset.from_list([{"text": "a"}])
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "splits")
    with pytest.raises(InputError, match="several splits; set split to one of train, test"):
        tokens(tokenizer, tmp_path / "splits")
    with pytest.raises(InputError, match="has no split 'dev'; set split to one of train, test"):
        tokens(tokenizer, tmp_path / "splits", split="dev")


def test_an_empty_dataset(tmp_path: Path, tokenizer: Any) -> None:
    import datasets

    datasets.Dataset.from_dict({"text": []}).save_to_disk(tmp_path / "none")
    with pytest.raises(InputError, match="holds no row"):
        tokens(tokenizer, tmp_path / "none")


def test_reference_parts_are_different_files(tokenizer: Any) -> None:
    domain = Domain(name="d", path="reference:c")
    parts = {part: load_tokens([domain], tokenizer, Intake(), part=part) for part in ("all", "calibration", "heldout")}
    assert content(parts["all"]) == content(parts["calibration"])
    trajectories = {part: {s.trajectory for s in found.sequences} for part, found in parts.items()}
    assert not trajectories["calibration"] & trajectories["heldout"]
    assert parts["heldout"].manifest["d"]["files"] == ["c.heldout.jsonl.gz"]
