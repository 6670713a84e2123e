"""Free memory, and memory that is given back when it is freed."""

import ctypes
import sys
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # mallopt's numbers for them
_KEPT = 256 * 2**20  # bytes at the top of the heap
_LARGEST = 32 * 2**20  # the most that glibc takes from its heap
_CGROUP = Path("/sys/fs/cgroup")  # version 2
LOADING_PEAK = 2.4  # times the weights that loading holds on a CPU at most, the highest that experiments/scale has seen


def loading_bytes(weights: int, device_type: str) -> int:
    """The most that loading so many bytes of weights holds: on a CPU, files, pieces and results side by side."""
    return round(weights * (LOADING_PEAK if device_type == "cpu" else 1))


def free_bytes(device: str) -> int:
    """Memory that a model could still take on the device: of the GPU, or of the machine and of the group it runs in."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    free = [_available()]
    limit, used = (_number(_CGROUP / name) for name in ("memory.max", "memory.current"))
    if limit is not None and used is not None:
        free.append(limit - used)
    return max(0, min(free))


def _available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines() if sys.platform == "linux" else []
    kilobytes = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    if kilobytes is None:
        return sys.maxsize  # not known here: assume that it fits
    return 1024 * int(kilobytes)


def _number(file: Path) -> int | None:
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdigit() else None


def keep_one_heap() -> None:
    """Let threads that are started from now on share the heap of the first one.

    glibc gives threads heaps of their own and keeps what is freed in each. Many threads of which one runs at a time
    would each keep what one of them needs. Does nothing where there is no glibc.
    """
    library = _glibc()
    if library is not None:
        library.mallopt(_M_ARENA_MAX, 1)


def keep_freed_memory() -> None:
    """Use freed memory again instead of asking the operating system for new pages, which costs a fault each.

    A pass frees and takes the same few megabytes for every chunk; a third of its time went into faults. Up to 256 MiB
    stay with the process. Does nothing where there is no glibc.
    """
    library = _glibc()
    if library is not None:
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT)
        library.mallopt(_M_MMAP_THRESHOLD, _LARGEST)


def give_back_freed_memory() -> None:
    """Return freed memory to the operating system. Does nothing where there is no glibc."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "gnu_get_libc_version") else None
