"""The most memory that a call takes at once, beyond what is there before it. Linux, or a GPU; elsewhere unknown."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

__all__ = ["peak_of"]

_T = TypeVar("_T")


def peak_of(call: Callable[[], _T], device: torch.device) -> tuple[_T, int | None]:
    """What ``call`` returns, and the bytes that it held at most; None where nobody can tell.

    On a CPU it is the process's resident memory. Freed memory that the allocator keeps is given back first, or what a
    call takes from there would not be seen.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()
        return result, torch.cuda.max_memory_allocated(device) - before
    if not _forget_peak():
        return call(), None
    before = _resident("VmRSS")
    result = call()
    return result, max(_resident("VmHWM") - before, 0)


def _forget_peak() -> bool:
    """Gives free memory back and begins to look for a new peak; False where this system cannot."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        return False
    return True


def _resident(field: str) -> int:
    """Bytes of a line of ``/proc/self/status``, which counts in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024
