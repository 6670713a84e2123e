"""The state of a running recording on disk, committed after whole batches: a killed run resumes from it."""

import hashlib
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from moeprune.artifacts.files import whole_file
from moeprune.recording.accumulate import LayerSums
from moeprune.recording.sample_rows import Stream

Sums = dict[Stream, dict[str, LayerSums]]  # stream -> layer name -> sums


class Commit:
    """`<file>.partial/`: one file with the sums of the first `done` batches and the identity of all batches.

    The sums are cumulative: a resumed recording adds the same float64 numbers in the same order as one that was
    never stopped, and its result has the same bits.
    """

    def __init__(self, directory: Path | None, identity: str, *, commit_seconds: float) -> None:
        self._path = None if directory is None else directory / "part.safetensors"
        self._identity = identity
        self._seconds = commit_seconds
        self._last, self._wait = time.monotonic(), commit_seconds

    def restore(self, make: Callable[[str, bool], dict[str, LayerSums]]) -> tuple[Sums, int]:
        """The sums so far and how many batches they hold; empty without a commit of exactly these batches."""
        if self._path is None or not self._path.is_file():
            return {}, 0
        sums: Sums = {}
        try:
            with safe_open(self._path, framework="pt") as file:
                header = json.loads(file.metadata()["part"])
                if header["identity"] != self._identity:
                    return {}, 0
                for domain, even in map(tuple, header["groups"]):
                    sums[domain, even] = make(domain, even)
                    for layer, total in sums[domain, even].items():
                        prefix = f"{domain}/{int(even)}/{layer}/"
                        total.restore({name: file.get_tensor(prefix + name) for name in total.state()})
        except (SafetensorError, KeyError, json.JSONDecodeError):
            return {}, 0  # written by an older version: record again rather than guess
        return sums, int(header["done"])

    @property
    def due(self) -> bool:
        """Whether it is time to commit."""
        return self._path is not None and time.monotonic() - self._last >= self._wait

    def write(self, sums: Sums, done: int, *, cost: float = 0.0) -> None:
        """Write the sums of the first `done` batches, at most once in `commit_seconds`.

        cost: seconds that were spent on more than the sums; the next commit waits for ten times that.
        """
        if self._path is None or not self.due:
            return
        tensors: dict[str, torch.Tensor] = {}
        for (domain, even), layers in sums.items():
            for layer, total in layers.items():
                tensors |= {f"{domain}/{int(even)}/{layer}/{name}": value for name, value in total.state().items()}
        header = {"identity": self._identity, "done": done, "groups": [list(stream) for stream in sums]}
        with whole_file(self._path) as beside:
            save_file(tensors, beside, metadata={"part": json.dumps(header)})
        self._last, self._wait = time.monotonic(), self._seconds and max(self._seconds, 10 * cost)


def identity_of(items: Iterable[object]) -> str:
    """A digest of everything that decides which numbers are added in which order."""
    return hashlib.sha256(json.dumps(list(items)).encode()).hexdigest()
