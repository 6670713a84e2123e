"""Trajectories that nearly repeat an earlier one are left out: they would only count its experts twice."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from moeprune.artifacts.errors import InputError
from moeprune.data.records import Record

SHINGLE = 5  # words
PERMUTATIONS = 128
MISSED, SUPERFLUOUS = 0.95, 0.05  # weights of the two errors a sketch can make; the second costs only an exact look


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
