"""Single flight: what several threads want at once is made by one of them, and the others wait for it."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

__all__ = ["SingleFlight"]

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """Who makes what, right now. A key is free again as soon as its maker has landed."""

    def __init__(self) -> None:
        self._flights: dict[Hashable, Future[T | None]] = {}
        self._lock = threading.Lock()

    def claim(self, keys: Sequence[Hashable]) -> tuple[list[Hashable], dict[Hashable, Future[T | None]]]:
        """Splits keys into those that the caller makes now, and those that somebody else is making.

        Whoever claims keys must :meth:`land` each of them, and must not wait for others before that: then nobody waits
        in a circle.
        """
        mine: list[Hashable] = []
        others: dict[Hashable, Future[T | None]] = {}
        with self._lock:
            for key in dict.fromkeys(keys):
                if key in self._flights:
                    others[key] = self._flights[key]
                else:
                    self._flights[key] = Future()
                    mine.append(key)
        return mine, others

    def land(self, key: Hashable, result: T | None) -> None:
        """Hands the result to all who wait; None tells them to make it themselves. Landing twice is harmless."""
        with self._lock:
            future = self._flights.pop(key, None)
        if future is not None:
            future.set_result(result)
