"""Free memory, and memory that is given back when it is freed."""

import ctypes
import sys
from pathlib import Path

_M_MMAP_THRESHOLD = -3  # mallopt's number for it
LARGE = 2**18  # bytes

_CGROUP = Path("/sys/fs/cgroup")  # version 2


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


def give_back_freed_memory() -> None:
    """From now on every large block is taken from the operating system and given back when it is freed.

    glibc keeps freed blocks of up to 32 MB once it has seen one, each thread its own; a pass that lives from holding
    one layer at a time would grow with what it has already dropped. Does nothing where there is no glibc.
    """
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        if hasattr(library, "gnu_get_libc_version"):
            library.mallopt(_M_MMAP_THRESHOLD, LARGE)
