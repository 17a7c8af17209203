"""Who leaves first when a limit is reached: a policy scores entries, a queue keeps them in order. Knows no store."""

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
"""(band, value): entries of a lower band leave first, within a band those of a lower value. Plain and finite."""

_GONE, _PARKED = -1, -2


@dataclass(slots=True, eq=False)
class Entry:
    """What a policy knows of a stored entry.

    Attributes:
        key: its name.
        nbytes: bytes it takes.
        cost: seconds to compute it again; 0.0 where unknown.
        priority: 0 to 100.
        expires: time at which ``priority`` falls to the default, or None.
        uses: how often it was put or used, this time included; 1 when it is new.
        used: time of the last use.
        score: the policy's word at the use before; (0, 0.0) when it is new.
        pins: as long as there are any it stays.
        turn: number of the last use among those of all entries; the earlier of two equal scores leaves first.
        queued: the queue's own: turn of the heap item that stands for this entry, or why none does.
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
    turn: int = 0
    queued: int = _GONE


class Policy(ABC):
    """Scores an entry, once each time it is put or used; a use never lowers the score. One object per store.

    Scores may be kept longer than the object that gave them, and compared with those of another object: what a policy
    keeps in itself is therefore little, named in its docstring, and found again by :meth:`resume`.

    Attributes:
        name: in URLs and on the command line.
        timed: looks at ``priority``: an entry is scored once more, without a use, when its priority falls.
    """

    name: str
    timed: bool = False

    @abstractmethod
    def score(self, entry: Entry) -> Score:
        """The entry's score, now that ``uses`` and ``used`` are up to date and ``score`` is still the one before."""

    def evicted(self, entry: Entry) -> None:  # noqa: B027  # most policies learn nothing from it
        """Told of every entry that left to make room."""

    def resume(self, lowest: Score) -> None:  # noqa: B027  # most policies keep nothing
        """Told, before anything else, the lowest score held when it takes over a store that has scores already."""


class EvictionQueue:
    """Entries in order of their score. Not locked: its store is.

    O(log n) to add and to evict, O(1) to use. Uses are paid for when they stand in the way: a single eviction may put
    right as many entries as were used since the one before it.

    Args:
        policy: who leaves first.
        clock: seconds; only differences and order matter.
    """

    def __init__(self, policy: Policy, clock: Callable[[], float] = time.monotonic) -> None:
        self.policy = policy
        self.nbytes = 0
        self._clock = clock
        self._entries: dict[Hashable, Entry] = {}
        self._turns = itertools.count(1)
        # One live item per entry, that whose turn is entry.queued; all others are left over and dropped when they
        # surface. Scores only rise with use, so a live item may be too low, never too high: it is put right then, too.
        self._heap: list[tuple[int, float, int, Entry]] = []
        self._expiries: list[tuple[float, int, Entry]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._entries)

    def get(self, key: Hashable) -> Entry | None:
        """The entry, not to be changed; None for an unknown key. No use is booked."""
        return self._entries.get(key)

    def add(self, key: Hashable, nbytes: int, retention: Retention = DEFAULT_RETENTION) -> None:
        """Adds an entry; one of the same key is replaced, its pins and uses kept."""
        old = self.remove(key)
        now = self._clock()
        expires = None if retention.duration is None else now + retention.duration
        entry = Entry(key, nbytes, retention.cost, retention.priority, expires, used=now, turn=next(self._turns))
        if old is not None:
            entry.uses, entry.pins, entry.score = old.uses + 1, old.pins, old.score
        entry.score = self.policy.score(entry)
        self._entries[key] = entry
        self.nbytes += nbytes
        self._push(entry)
        if expires is not None and self.policy.timed:
            heapq.heappush(self._expiries, (expires, entry.turn, entry))

    def use(self, key: Hashable) -> None:
        """Books a use; nothing happens for an unknown key."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.uses += 1
            entry.used = self._clock()
            entry.turn = next(self._turns)
            entry.score = self.policy.score(entry)

    def remove(self, key: Hashable) -> Entry | None:
        """Takes an entry out; None for an unknown key."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            entry.queued = _GONE
            self.nbytes -= entry.nbytes
            self._compact()
        return entry

    def evict(self) -> Entry | None:
        """Takes the lowest entry that is not pinned out; None when there is none."""
        self._expire()
        while self._heap:
            turn, entry = self._heap[0][2:]
            if entry.queued == turn != entry.turn:
                self._queue(entry, heapq.heapreplace)
                continue
            heapq.heappop(self._heap)
            if entry.queued != turn:
                continue
            if entry.pins:
                entry.queued = _PARKED  # the last unpin brings it back
                continue
            self.remove(entry.key)
            self.policy.evicted(entry)
            return entry
        return None

    def pin(self, key: Hashable, count: int = 1) -> bool:
        """Adds ``count`` pins (negative: takes them off); False for an unknown key, or one without pins to take."""
        entry = self._entries.get(key)
        if entry is None or entry.pins + count < 0:
            return False
        entry.pins += count
        if not entry.pins and entry.queued == _PARKED:
            self._push(entry)
        return True

    def _push(self, entry: Entry) -> None:
        self._queue(entry, heapq.heappush)
        self._compact()

    def _queue(self, entry: Entry, put: Callable[..., object]) -> None:
        entry.queued = entry.turn
        put(self._heap, (*entry.score, entry.turn, entry))

    def _expire(self) -> None:
        """Priorities whose time is over fall to the default. That may lower scores, so these entries queue anew."""
        if not self._expiries:
            return
        now = self._clock()
        while self._expiries and self._expiries[0][0] <= now:
            entry = heapq.heappop(self._expiries)[2]
            if entry.queued == _GONE:
                continue
            entry.priority, entry.expires = DEFAULT_PRIORITY, None
            entry.score = self.policy.score(entry)
            if entry.queued != _PARKED:
                entry.turn = next(self._turns)  # no item of its own may look like the new one
                self._push(entry)

    def _compact(self) -> None:
        """Drops what is left over, once it is the most of a heap."""
        most = 64 + 2 * len(self._entries)
        if len(self._heap) > most:
            entries = [entry for entry in self._entries.values() if entry.queued != _PARKED]
            for entry in entries:
                entry.queued = entry.turn
            self._heap = [(*entry.score, entry.turn, entry) for entry in entries]
            heapq.heapify(self._heap)
        if len(self._expiries) > most:
            self._expiries = [(e.expires, e.turn, e) for e in self._entries.values() if e.expires is not None]
            heapq.heapify(self._expiries)
