"""What figures were measured on: versions, processor, threads, dtype, commit. Knows nothing of what was measured."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

__all__ = ["idle_cores", "machine_record"]


def machine_record(dtype: torch.dtype) -> dict[str, Any]:
    """Plain data for the head of a JSON file.

    Args:
        dtype: of weights and KV.

    Returns:
        Keys ``python``, ``torch``, ``transformers``, ``kvblend`` (versions; None if not installed), ``cpu``, ``cores``
        (that this process may use), ``threads`` (of torch), ``gpu`` (or None), ``dtype`` and ``commit`` (of the
        checkout that this file belongs to, ``-dirty`` behind it where files were changed; None outside of one).
    """
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "transformers", "kvblend")},
        "cpu": _cpu(),
        "cores": _cores(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "dtype": str(dtype).removeprefix("torch."),
        "commit": _commit(Path(__file__)),
    }


def idle_cores() -> int:
    """Cores of this process that nobody used in the last minute, at least 1.

    A pass of small operations meets at a barrier thousands of times. A thread that shares its core with another process
    keeps all the others waiting there, so one thread too many can cost more than all the others gain.
    """
    cores = _cores() or 1
    try:
        busy = os.getloadavg()[0]
    except (AttributeError, OSError):  # Windows has no load average
        busy = 0.0
    return max(1, cores - round(busy))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    """The processor's name, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _cores() -> int | None:
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS and Windows
    return len(affinity(0)) if affinity else os.cpu_count()


def _commit(file: Path) -> str | None:
    """The commit of the checkout that tracks ``file``; an installed copy inside a foreign checkout has none."""
    if _git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return None
    return _git(file.parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints, or None when it is absent, fails or hangs."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
