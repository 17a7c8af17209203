"""Seconds per stage. On a GPU each stage ends with a synchronisation, so that its seconds are its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["Clock"]


class Clock:
    """Collects named stages of one request."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.started = self.now(device)
        self.seconds: dict[str, float] = {}
        self._ends: dict[str, float] = {}

    @staticmethod
    def now(device: torch.device) -> float:
        """Seconds on a monotonic clock, after everything queued on ``device`` has run."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Times a stage; a stage entered twice adds up."""
        begin = self.now(self.device)
        try:
            yield
        finally:
            self._ends[stage] = self.now(self.device)
            self.seconds[stage] = self.seconds.get(stage, 0.0) + self._ends[stage] - begin

    def split(self, stage: str, first: str, at: float | None) -> None:
        """Books the part of ``stage`` before the moment ``at`` under ``first``."""
        if at is None:
            return
        rest = self._ends[stage] - at
        self.seconds[first] = self.seconds[stage] - rest
        self.seconds[stage] = rest

    def shift(self, stage: str, other: str, seconds: float) -> None:
        """Books ``seconds`` of ``stage`` under ``other`` instead."""
        if seconds > 0.0:
            self.seconds[stage] = self.seconds.get(stage, 0.0) - seconds
            self.seconds[other] = self.seconds.get(other, 0.0) + seconds

    @property
    def total(self) -> float:
        """Seconds since the clock was made."""
        return self.now(self.device) - self.started
