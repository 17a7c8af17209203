"""Who leaves first when a limit is reached: a policy scores entries, a queue keeps them in order."""

from __future__ import annotations

import heapq
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from blend.chunk import DEFAULT_PRIORITY, DEFAULT_RETENTION, Retention

__all__ = ["Entry", "EvictionQueue", "Policy", "Score"]

Score = tuple[int, float]
"""(band, value): entries of a lower band leave first, within a band those of a lower value."""


@dataclass(slots=True)
class Entry:
    """What a policy knows of a stored entry.

    Attributes:
        key: its name.
        nbytes: bytes it takes.
        cost: seconds to compute it again; 0.0 where unknown.
        priority: 0 to 100.
        expires: time at which ``priority`` falls to the default, or None.
        uses: how often it was put or used.
        used: time of the last use.
        score: the policy's word at the last use.
        pins: as long as there are any it stays.
    """

    key: Hashable
    nbytes: int
    cost: float = 0.0
    priority: int = DEFAULT_PRIORITY
    expires: float | None = None
    uses: int = 1
    used: float = 0.0
    score: Score = (0, 0.0)
    pins: int = 0


class Policy(ABC):
    """Scores an entry whenever it is put or used; a use never lowers the score. One object per store.

    Attributes:
        name: in URLs and on the command line.
    """

    name: str

    @abstractmethod
    def score(self, entry: Entry) -> Score:
        """The entry's score now that ``uses`` and ``used`` are up to date."""

    def evicted(self, entry: Entry) -> None:  # noqa: B027  # most policies learn nothing from it
        """Told of every entry that left to make room."""


class EvictionQueue:
    """Entries in order of their score: O(log n) to add and to evict, O(1) to use. Not locked: its store is.

    Args:
        policy: who leaves first.
        clock: seconds; only differences and order matter.
    """

    def __init__(self, policy: Policy, clock: Callable[[], float] = time.monotonic) -> None:
        self.policy = policy
        self.nbytes = 0
        self._clock = clock
        self._entries: dict[Hashable, Entry] = {}
        self._serial = itertools.count()
        # Scores only rise with use, so a heap item may be too low, never too high: it is put right when it surfaces.
        self._heap: list[tuple[Score, int, Entry]] = []
        self._expiries: list[tuple[float, int, Entry]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._entries)

    def add(self, key: Hashable, nbytes: int, retention: Retention = DEFAULT_RETENTION) -> None:
        """Adds an entry; one of the same key is replaced, its pins and uses kept."""
        old = self.remove(key)
        now = self._clock()
        expires = None if retention.duration is None else now + retention.duration
        entry = Entry(key, nbytes, retention.cost, retention.priority, expires, used=now)
        if old is not None:
            entry.uses, entry.pins = old.uses + 1, old.pins
        entry.score = self.policy.score(entry)
        self._entries[key] = entry
        self.nbytes += nbytes
        heapq.heappush(self._heap, (entry.score, next(self._serial), entry))
        if expires is not None:
            heapq.heappush(self._expiries, (expires, next(self._serial), entry))

    def use(self, key: Hashable) -> None:
        """Books a use; nothing happens for an unknown key."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.uses += 1
            entry.used = self._clock()
            entry.score = self.policy.score(entry)

    def remove(self, key: Hashable) -> Entry | None:
        """Takes an entry out; None for an unknown key."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.nbytes -= entry.nbytes
            self._compact()
        return entry

    def evict(self) -> Entry | None:
        """Takes the lowest entry that is not pinned out; None when there is none."""
        self._expire()
        pinned = []
        victim = None
        while self._heap and victim is None:
            item = heapq.heappop(self._heap)
            score, serial, entry = item
            if self._entries.get(entry.key) is not entry:
                continue  # removed or replaced since
            if entry.score != score:
                heapq.heappush(self._heap, (entry.score, serial, entry))
            elif entry.pins:
                pinned.append(item)
            else:
                victim = entry
        for item in pinned:
            heapq.heappush(self._heap, item)
        if victim is not None:
            del self._entries[victim.key]
            self.nbytes -= victim.nbytes
            self.policy.evicted(victim)
        return victim

    def pin(self, key: Hashable, count: int = 1) -> bool:
        """Adds ``count`` pins (negative: takes them off); False for an unknown key, or one without pins to take."""
        entry = self._entries.get(key)
        if entry is None or entry.pins + count < 0:
            return False
        entry.pins += count
        return True

    def _expire(self) -> None:
        """Priorities whose time is over fall to the default. That lowers scores, so these entries are queued anew."""
        now = self._clock()
        while self._expiries and self._expiries[0][0] <= now:
            _, _, entry = heapq.heappop(self._expiries)
            if self._entries.get(entry.key) is entry:
                entry.priority, entry.expires = DEFAULT_PRIORITY, None
                entry.score = self.policy.score(entry)
                heapq.heappush(self._heap, (entry.score, next(self._serial), entry))

    def _compact(self) -> None:
        """Drops heap items of entries that are gone, once they are the most of it."""
        if len(self._heap) > 64 + 2 * len(self._entries):
            self._heap = [(e.score, next(self._serial), e) for e in self._entries.values()]
            heapq.heapify(self._heap)
