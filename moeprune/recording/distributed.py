"""Recording with many processes (torchrun): each takes some of the batches, the first adds what all have recorded.

torchrun --nproc-per-node 8 --nnodes 4 ... -m moeprune run CONFIG

Every process plans the same batches and takes its share of them, so a token's numbers do not depend on how many there
are. Sums are exchanged once, at the end, and added in the order of the ranks: two runs give the same bits.
"""

import heapq
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from moeprune.artifacts.errors import InputError
from moeprune.recording.accumulate import LayerSums
from moeprune.recording.commit import Sums

LOST_AFTER = 60.0  # seconds without a sign of life
BEAT = 1.0  # seconds between two signs


class LostRankError(RuntimeError):
    """Another process of the run has failed or is gone; what was committed is kept."""


def join() -> "Team | None":
    """This process's place among those that torchrun started, or None when it is alone.

    Raises InputError when there are others and nothing says how to reach them.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise InputError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} and {', '.join(missing)} is not set; start the processes with "
            "`torchrun --nproc-per-node N -m moeprune ...`, or unset WORLD_SIZE"
        )
    from torch.distributed import rendezvous

    store, rank, size = next(iter(rendezvous("env://", timeout=timedelta(seconds=LOST_AFTER))))
    return Team(store, rank, size)


class Team:
    """The processes that record together. Rank 0 leads: it decides, adds up, and goes on alone afterwards."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._store = store
        # The ranks this process needs: the leader needs all, all need the leader.
        self._others = range(1, size) if rank == 0 else range(1)
        self._signs = dict.fromkeys(self._others, (b"", time.monotonic()))
        self._watched = 0.0
        self._ended = threading.Event()
        threading.Thread(target=self._give_signs, daemon=True).start()

    def _give_signs(self) -> None:
        number = 0
        while not self._ended.wait(BEAT if number else 0):
            number += 1
            try:
                self._store.set(f"sign/{self.rank}", str(number))
            except RuntimeError:  # the process that keeps the store is gone; the next `watch` reports it
                return

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def share(self, batches: Sequence[list[int]], sizes: Sequence[int]) -> list[list[int]]:
        """This process's batches, in their order: the largest first go to the rank with the least so far."""
        loads = [(0, rank) for rank in range(self.size)]
        own = []
        for number in sorted(range(len(batches)), key=lambda number: (-sizes[number], number)):
            load, rank = heapq.heappop(loads)
            heapq.heappush(loads, (load + sizes[number], rank))
            if rank == self.rank:
                own.append(number)
        return [batches[number] for number in sorted(own)]

    def folder(self, partial: Path | None) -> Path | None:
        """Where this process commits its own sums."""
        return None if partial is None else partial / f"rank-{self.rank:04d}-of-{self.size:04d}"

    def watch(self) -> None:
        """Raise LostRankError when a process that is needed has failed or gives no sign of life. Cheap."""
        now = time.monotonic()
        if now - self._watched < BEAT:
            return
        self._watched = now
        for rank in self._others:
            failure = self._look(f"failed/{rank}")
            if failure is not None:
                raise LostRankError(f"rank {rank} of {self.size} failed: {failure.decode()}")
            sign = self._look(f"sign/{rank}") or b""
            last, since = self._signs[rank]
            if sign != last:
                self._signs[rank] = (sign, now)
            elif now - since > LOST_AFTER:
                raise LostRankError(
                    f"rank {rank} of {self.size} has given no sign of life for {LOST_AFTER:.0f} s; every process has "
                    "kept its part, so the same command goes on from there"
                )

    def watching(self, on_progress: Callable[[int, int], None] | None) -> Callable[[int, int], None]:
        """A progress callback that also watches the other processes."""

        def report(done: int, total: int) -> None:
            self.watch()
            if on_progress is not None:
                on_progress(done, total)

        return report

    def _look(self, key: str) -> bytes | None:
        try:
            return self._store.get(key) if self._store.check([key]) else None
        except RuntimeError as error:
            raise LostRankError(f"the process that connects all ranks is gone ({error})") from error

    def wait_for(self, key: str) -> bytes:
        """The value under this key, once a process sets it. Raises LostRankError when a needed process is lost."""
        while (value := self._look(key)) is None:
            self.watch()
            time.sleep(BEAT / 20)
        return value

    def tell(self, key: str, value: str = "") -> None:
        self._store.set(key, value)

    def add_up(self, sums: Sums) -> None:
        """Make `sums`, which hold the same streams and layers everywhere, the sums of all processes.

        Raises LostRankError when a process does not take part.
        """
        import torch.distributed as dist

        self.tell(f"ready/{self.rank}")
        for rank in range(self.size):
            self.wait_for(f"ready/{rank}")
        device = next((total.tokens.device for layers in sums.values() for total in layers.values()), None)
        backend = "nccl" if device is not None and device.type == "cuda" else "gloo"
        limit = timedelta(seconds=LOST_AFTER)
        try:
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("sums", self._store),
                rank=self.rank,
                world_size=self.size,
                timeout=limit,
            )
            for stream in sorted(sums):
                for _, total in sorted(sums[stream].items()):
                    self._add_up(total)
        except RuntimeError as error:
            raise LostRankError(f"rank {self.rank} could not exchange sums with the others ({error})") from error
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    def _add_up(self, total: LayerSums) -> None:
        """One layer's sums: sent to the leader, added in the order of the ranks, and sent to all."""
        import torch.distributed as dist

        state = total.state()
        data = _packed(state).to(total.tokens.device)
        if self.leads:
            for rank in range(1, self.size):
                other = torch.empty_like(data)
                dist.recv(other, src=rank)
                state = _added(state, _unpacked(other.cpu(), state))
            data = _packed(state).to(data.device)
        else:
            dist.send(data, dst=0)
        dist.broadcast(data, src=0)
        total.restore(_unpacked(data.cpu(), state))

    def dismiss(self) -> None:
        """The leader releases the others and returns when all have left. Raises LostRankError when one is lost."""
        if self._look("order") is None:
            self.tell("order", "null")
        self.tell("saved")
        for rank in range(1, self.size):
            self.wait_for(f"left/{rank}")

    @contextmanager
    def together(self) -> Iterator[None]:
        """As `telling`; afterwards this process gives no more signs of life."""
        try:
            with self.telling():
                yield
        finally:
            self._ended.set()

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Inside, an error of this process ends the others too, with the reason."""
        try:
            yield
        except BaseException as error:
            self.tell(f"failed/{self.rank}", f"{type(error).__name__}: {error}")
            raise


def _packed(state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """All tensors as bytes, one after the other."""
    return torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for _, tensor in sorted(state.items())])


def _unpacked(data: torch.Tensor, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out, position = {}, 0
    for name, tensor in sorted(like.items()):
        size = tensor.numel() * tensor.element_size()
        out[name] = data[position : position + size].clone().view(tensor.dtype).reshape(tensor.shape)
        position += size
    assert position == len(data)
    return out


def _added(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Merge two ranks: add sums, take the larger maximum, take sample rows from the rank that has them."""
    out = {}
    for name, tensor in one.items():
        if name == "output_max":
            out[name] = torch.maximum(tensor, other[name])
        elif name.startswith("sample/"):
            out[name] = torch.where(tensor != 0, tensor, other[name])
        else:
            out[name] = tensor + other[name]
    return out
