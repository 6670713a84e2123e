"""Where records come from: files, folders, globs, datasets, the reference data."""

import glob
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from moeprune.artifacts.errors import InputError
from moeprune.data.options import Domain, Part
from moeprune.data.readers import SUFFIXES, Raw, RecordProblem, read_file, suffix_of
from moeprune.reference import DATA_DIR, DOMAINS

REFERENCE = "reference:"
DATASET_FILES = ("dataset_info.json", "state.json"), ("dataset_dict.json",)  # what save_to_disk writes


@dataclass(frozen=True)
class Source:
    """Records in the order of their files, and the files for the manifest."""

    records: Iterator[Raw]
    files: tuple[str, ...]  # empty for a dataset of the hub
    ignored: tuple[str, ...] = ()  # files of a folder whose ending is not a known one
    splits_itself: bool = False  # reference data has its held-out part in files of its own


def open_source(domain: Domain, *, part: Part = "all") -> Source:
    """The records behind `domain.path`. Raises InputError for a path that leads nowhere."""
    if domain.path.startswith(REFERENCE):
        return _reference(domain, part)
    path = Path(domain.path).expanduser()
    if path.is_file():
        return _files(domain, [path])
    if path.is_dir():
        return _folder(domain, path)
    if glob.has_magic(domain.path):
        files = sorted(file for file in map(Path, glob.glob(str(path), recursive=True)) if file.is_file())
        if not files:
            raise InputError(f"{_where(domain)} matches no file; correct the pattern")
        return _files(domain, files)
    if _looks_local(domain.path):
        raise InputError(
            f"{_where(domain)} does not exist; give a file, a folder, a glob, a dataset's name or {REFERENCE}NAME"
        )
    return _dataset(domain, domain.path)


def _where(domain: Domain) -> str:
    return f"domain {domain.name}: path {domain.path}"


def _looks_local(path: str) -> bool:
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or "\\" in path or bool(suffix_of(Path(path)))


def _reference(domain: Domain, part: Part) -> Source:
    name = domain.path.removeprefix(REFERENCE)
    if name not in DOMAINS:
        raise InputError(f"{_where(domain)}: there is no such reference data; there are {', '.join(DOMAINS)}")
    held = "heldout" if part == "heldout" else "calibration"
    path = DATA_DIR / f"{name}.{held}.jsonl.gz"
    # shown without the place of the installation, so that a manifest reads the same everywhere
    records = (
        Raw(f"{domain.path} ({path.name}:{raw.place.rpartition(':')[2]})", raw.value, raw.problem)
        for raw in read_file(path)
    )
    return Source(records, (path.name,), splits_itself=True)


def _files(domain: Domain, files: list[Path], ignored: tuple[str, ...] = ()) -> Source:
    for file in files:
        if not suffix_of(file):
            raise InputError(f"{_where(domain)}: {file.name} has no known ending; known are {', '.join(SUFFIXES)}")
    if domain.split or domain.config or domain.revision:
        raise InputError(
            f"{_where(domain)}: config, split and revision belong to datasets, and this is a file; remove them"
        )
    return Source(chain.from_iterable(read_file(file) for file in files), tuple(map(str, files)), ignored)


def _folder(domain: Domain, folder: Path) -> Source:
    if any(all((folder / name).is_file() for name in names) for names in DATASET_FILES):
        return _saved_dataset(domain, folder)
    if domain.split or domain.config:
        return _dataset(domain, str(folder))
    every = sorted(path for path in folder.rglob("*") if path.is_file() and not _hidden(path, folder))
    files = [path for path in every if suffix_of(path)]
    if not files:
        raise InputError(f"{_where(domain)} holds no file with a known ending ({', '.join(SUFFIXES)})")
    return _files(domain, files, tuple(str(path) for path in every if not suffix_of(path)))


def _hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _saved_dataset(domain: Domain, folder: Path) -> Source:
    from datasets import load_from_disk

    try:
        dataset = load_from_disk(str(folder))
    except (OSError, ValueError, LookupError, TypeError) as error:  # a LookupError for a dataset without rows
        raise InputError(
            f"{_where(domain)}: `datasets` cannot read this folder, or it holds no row ({error})"
        ) from error
    held = getattr(dataset, "split", None)
    if domain.split and held not in (None, domain.split) and not isinstance(dataset, dict):
        raise InputError(f"{_where(domain)} holds the split {held}, not {domain.split}; correct split")
    return Source(_rows(domain, _one_split(domain, dataset)), (str(folder),))


def _dataset(domain: Domain, name: str) -> Source:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        dataset = load_dataset(
            name, domain.config, split=domain.split, revision=domain.revision, streaming=domain.streaming
        )
    except (DatasetsError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"{_where(domain)} is neither a local path nor a dataset that `datasets` can load ({first}); "
            "correct path, config, split or revision"
        ) from error
    return Source(_rows(domain, _one_split(domain, dataset)), (name,) if Path(name).is_dir() else ())


def _one_split(domain: Domain, dataset: Any) -> Any:
    """The dataset itself, or the wanted split of a dictionary of splits."""
    if not isinstance(dataset, dict):
        return dataset
    splits = list(dataset)
    wanted = domain.split or (splits[0] if len(splits) == 1 else "")
    if wanted not in dataset:
        finding = f"has no split {wanted!r}" if wanted else "has several splits"
        raise InputError(f"{_where(domain)} {finding}; set split to one of {', '.join(splits)}")
    return dataset[wanted]


def _rows(domain: Domain, rows: Any) -> Iterator[Raw]:
    for index, value in enumerate(rows):
        yield Raw(f"{domain.path} row {index}", value, tabular=True)
    if getattr(rows, "num_rows", 1) == 0:
        yield Raw(domain.path, problem=RecordProblem("empty file", "", "the dataset holds no row"))
