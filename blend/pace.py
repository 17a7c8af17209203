"""How fast things go here: seconds per row, learnt from the requests themselves. Knows nothing of what the rows do."""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Hashable

__all__ = ["Pace"]

_KEEP = 5  # measurements per kind and size: enough for a median that one slow moment does not move


class Pace:
    """Medians of recent measurements, apart by kind of work and by size (a row costs more in a longer prompt)."""

    def __init__(self) -> None:
        self._known: dict[tuple[Hashable, int], deque[float]] = {}
        self._lock = threading.Lock()

    def note(self, kind: Hashable, rows: float, size: int, seconds: float) -> None:
        """Books ``seconds`` for ``rows`` rows of a prompt of ``size`` rows."""
        if rows > 0:
            with self._lock:
                self._known.setdefault((kind, _bucket(size)), deque(maxlen=_KEEP)).append(seconds / rows)

    def seconds(self, kind: Hashable, rows: float, size: int) -> float | None:
        """What it will take, or None where nothing like it was measured."""
        with self._lock:
            known = self._known.get((kind, _bucket(size)))
            return statistics.median(known) * rows if known else None


def _bucket(size: int) -> int:
    """Sizes within a factor of two share their measurements."""
    return size.bit_length()
