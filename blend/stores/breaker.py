"""Stops asking a server that does not answer, and tries again after a pause. Knows nothing of stores."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from blend.errors import StoreUnavailable

__all__ = ["Breaker"]

T = TypeVar("T")

log = logging.getLogger("kvblend")


class Breaker:
    """Calls a server; after a failure every call is refused at once until a pause is over.

    Then one call tries, while the others are still refused; each further failure doubles the pause. A request thus
    waits for a dead server once per pause, not once per chunk. An outage is logged once (WARNING), and its end (INFO).

    Args:
        name: of the server, in the log; without a password.
        errors: what counts as no answer.
        answers: errors that are answers, though some of them may be ``errors`` by type; they pass through.
        clock: seconds.
        pause: seconds after the first failure.
        longest: seconds that the pause grows up to.
    """

    def __init__(
        self,
        name: str,
        errors: tuple[type[Exception], ...],
        *,
        answers: tuple[type[Exception], ...] = (),
        clock: Callable[[], float] = time.monotonic,
        pause: float = 1.0,
        longest: float = 30.0,
    ) -> None:
        self.name = name
        self._errors = errors
        self._answers = answers
        self._clock = clock
        self._first = pause
        self._longest = longest
        self._lock = threading.Lock()
        self._pause = 0.0  # 0.0: the server answers
        self._until = 0.0

    @property
    def resting(self) -> bool:
        """Whether a call would be refused now."""
        return self._pause > 0 and self._clock() < self._until

    def call(self, ask: Callable[[], T]) -> T:
        """What ``ask`` returns.

        Raises:
            StoreUnavailable: it failed, or was not tried; the cause is its error, or None where it was not tried.
        """
        with self._lock:
            if self.resting:
                raise StoreUnavailable(f"{self.name} did not answer and is left alone for a moment")
            pause = self._pause
            # Where this call is the one that tries, the others go on being refused meanwhile.
            self._until = self._clock() + pause
        try:
            answer = ask()
        except self._answers:
            self._answered()
            raise
        except self._errors as error:
            self._failed(pause, error)
            raise StoreUnavailable(f"{self.name} does not answer: {error}") from error
        self._answered()
        return answer

    def _failed(self, pause: float, error: Exception) -> None:
        with self._lock:
            if pause != self._pause:
                return  # another call that ran at the same time has booked this outage
            self._pause = min(2 * pause, self._longest) if pause else self._first
            self._until = self._clock() + self._pause
        if not pause:
            log.warning("%s does not answer (%s): its entries are misses until it does", self.name, error)

    def _answered(self) -> None:
        with self._lock:
            was, self._pause = self._pause, 0.0
        if was:
            log.info("%s answers again", self.name)
