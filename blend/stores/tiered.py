"""Stores one below the other, the fastest first, that are used as one. Knows nothing of what they are.

::

    put      tier 0 in the request, those below by the writer's thread ("back"), or in the request too ("through")
    get      tier 0, then what waits for the writer, then tier 1 ...; a hit below is promoted to the tiers above
    eviction by each tier for itself: what tier 0 drops is below already, or waits to be written there

So nothing has to be moved down when a tier makes room: demotion is dropping. An entry is gone once the last tier has
dropped it, and each tier above it.

No tier gives back what another has a newer entry for: one that does not take an entry drops the older one, and what was
read before an entry changed, or while it did, is not promoted.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal, TypeVar

from blend.chunk import ChunkKV
from blend.errors import StoreError, StoreUnavailable
from blend.stores.base import Store, StoreStats
from blend.stores.breaker import Breaker
from blend.stores.codecs import codec_by_name
from blend.stores.lazy import LayerSequence, Pair
from blend.stores.writer import Job, Writer

__all__ = ["TieredStore"]

T = TypeVar("T")

_SLOTS = 4096


class TieredStore(Store):
    """Several stores as one.

    A tier that raises is left alone for a pause and counted (``failures``); a request never sees it. Layers that are
    read one by one come from below when they are asked for; once all were, the entry is promoted.

    A put waits while more than ``queue_bytes`` wait to be written: an entry has cost more seconds than writing it
    takes, and dropping it from the queue would lose it as soon as tier 0 needs the room. A promotion does not wait,
    since its entry is safe below.

    Where one tier's codec loses digits, those without get what it gives back, so that an entry does not change with the
    tier it comes from. (Promoted into another tier with the codec it is rounded once more.)

    Args:
        tiers: fastest first. They belong to this store from now on, and are closed with it.
        write: ``back`` writes the tiers below in the background, ``through`` in the request. An entry that tier 0
            refuses is written below in the request in any case.
        queue_bytes: bytes of KV that may wait to be written.
        clock: seconds, for the pauses after a failure.

    Raises:
        StoreError: no tiers, tiers with different lossy codecs, or an argument that cannot be.
    """

    def __init__(
        self,
        tiers: Sequence[Store],
        *,
        write: Literal["through", "back"] = "back",
        queue_bytes: int = 1 << 30,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not tiers:
            raise StoreError("a tiered store needs at least one store, fastest first")
        if write not in ("through", "back"):
            raise StoreError(f"write is {write!r}: choose from 'back', 'through'")
        if queue_bytes <= 0:
            raise StoreError(f"queue_bytes is {queue_bytes}: give a positive number, such as 1 << 30")
        self.codec = _common_codec(tiers)
        self.tiers = tuple(tiers)
        self._own = StoreStats()
        self._tiers = tuple(_Tier(store, self._own, clock) for store in tiers)
        self._write_back = write == "back"
        self._writer = Writer(queue_bytes)
        # By slot of the key. Counts of changes: an entry read before a change must not be promoted after it; and of
        # changes under way: what is read meanwhile may come from a tier that has not been told yet.
        self._changes = [0] * _SLOTS
        self._changing = [0] * _SLOTS
        self._lock = threading.Lock()
        self._finish = weakref.finalize(self, self._writer.close)  # at the latest when the interpreter ends

    # --- the verbs --------------------------------------------------------------------------------

    def get(self, key: str) -> ChunkKV | None:
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[str], *, layerwise: bool = False) -> list[ChunkKV | None]:
        since = [self._moment(key) for key in keys]
        found: list[ChunkKV | None] = [None] * len(keys)
        missing = list(range(len(keys)))
        for level in range(len(self._tiers)):
            if level == 1:  # what waits is the newest there is, but for tier 0
                for i in missing:
                    found[i] = self._writer.get(keys[i])
                missing = [i for i in missing if found[i] is None]
            if not missing:
                break
            answers = self._tiers[level].get_many([keys[i] for i in missing], layerwise)
            for i, kv in zip(missing, answers, strict=True):
                found[i] = kv and self._hit(kv, level, since[i], layerwise)
            missing = [i for i in missing if found[i] is None]
        self._own.add(hits=len(keys) - len(missing), misses=len(missing))
        return found

    def put(self, kv: ChunkKV) -> bool:
        below = self._tiers[1:]
        own = _own_copy(kv) if below and self._write_back else kv
        read = own.with_layers(codec_by_name(self.codec).round_trip(own.layers))
        with self._change(kv.key):
            kept = self._tiers[0].put_as(own, read)
            if kept and below and self._write_back:
                nbytes = own.nbytes if read.layers is own.layers else 2 * own.nbytes
                return self._writer.add(Job(read, partial(_put_all, below, own), nbytes), wait=True)
            self._writer.cancel(kv.key)
            kept = _put_all(below, own, read) or kept
        self._own.add(refused=not kept)
        return kept

    def delete(self, key: str) -> bool:
        with self._change(key):
            known = self._writer.cancel(key)
            return sum(tier.delete(key) for tier in reversed(self._tiers)) > 0 or known

    def __contains__(self, key: object) -> bool:
        waiting = isinstance(key, str) and self._writer.get(key) is not None
        return waiting or any(tier.holds(key) for tier in self._tiers)

    def keys(self) -> Iterator[str]:
        waiting = self._writer.keys()  # first: what is written meanwhile is seen below
        return iter(dict.fromkeys(waiting + [key for tier in self._tiers for key in tier.listed()]))

    def pin(self, key: str) -> bool:
        """Pins the entry in each tier that holds it and can pin; False when none did."""
        return sum(tier.pin(key) for tier in self._tiers) > 0

    def unpin(self, key: str) -> bool:
        return sum(tier.ask(lambda store: store.unpin(key), False) for tier in self._tiers) > 0

    def flush(self) -> None:
        """Waits until everything is written to the tiers below."""
        self._writer.drain()

    def close(self) -> None:
        """Writes what waits to be written, then closes the tiers."""
        self._writer.close()
        for tier in self._tiers:
            tier.ask(lambda store: store.close(), None)

    # --- counters ---------------------------------------------------------------------------------

    @property
    def stats(self) -> StoreStats:
        """Hits, misses and refusals of the whole; the rest summed over the tiers."""
        total = StoreStats(hits=self._own.hits, misses=self._own.misses, refused=self._own.refused)
        total.failures = self._own.failures
        for stats in self.tier_stats:
            total.add(
                corrupt=stats.corrupt,
                foreign=stats.foreign,
                evicted=stats.evicted,
                failures=stats.failures,
                bytes_read=stats.bytes_read,
                read_seconds=stats.read_seconds,
            )
        return total

    @property
    def tier_stats(self) -> tuple[StoreStats, ...]:
        """Counters of each tier."""
        return tuple(store.stats for store in self.tiers)

    # --- promotion --------------------------------------------------------------------------------

    def _hit(self, kv: ChunkKV, level: int, since: int | None, layerwise: bool) -> ChunkKV:
        if level == 0:
            return kv
        if layerwise:
            return kv.with_layers(_Promoting(kv, lambda whole: self._promote(whole, level, since)))
        self._promote(kv, level, since)
        return kv

    def _promote(self, kv: ChunkKV, level: int, since: int | None) -> None:
        """Puts an entry of tier ``level`` into those above: the first at once, others in the background."""
        slot, between, changes = _slot(kv.key), self._tiers[1:level], self._changes

        def run(kv: ChunkKV) -> None:  # does not hold the store, which its writer would keep alive
            if changes[slot] == since:
                _put_all(between, kv, kv)

        with self._lock:
            if changes[slot] != since:
                return  # nor may it wait for the writer: what waits is taken for the newest there is
            self._tiers[0].put(kv)
            if between:
                self._writer.add(Job(kv, run, kv.nbytes), wait=False)

    def _moment(self, key: str) -> int | None:
        """When an entry is read, in changes; None while it changes: then it is not to be promoted."""
        slot = _slot(key)
        changes = self._changes[slot]  # read first and written last, so that looking needs no lock
        return None if self._changing[slot] else changes

    @contextmanager
    def _change(self, key: str) -> Iterator[None]:
        """While the tiers are told, one after another, of a change to an entry."""
        slot = _slot(key)
        with self._lock:
            self._changing[slot] += 1
            self._changes[slot] += 1
        try:
            yield
        finally:
            with self._lock:
                self._changing[slot] -= 1


class _Tier:
    """A store that is asked with care."""

    def __init__(self, store: Store, stats: StoreStats, clock: Callable[[], float]) -> None:
        self._store = store
        self._stats = stats
        self._loses = not codec_by_name(store.codec).lossless
        self._breaker = Breaker(f"the tier {type(store).__name__}", (Exception,), clock=clock)
        # Keys of entries that it did not take, and may still have an older one of; until it takes one.
        self._stale: set[str] = set()

    def ask(self, ask: Callable[[Store], T], otherwise: T) -> T:
        """The store's answer, or the other one when it raises, or did so a moment ago."""
        try:
            return self._breaker.call(lambda: ask(self._store))
        except StoreUnavailable as error:
            self._stats.add(failures=error.__cause__ is not None)
            return otherwise

    def get_many(self, keys: Sequence[str], layerwise: bool) -> list[ChunkKV | None]:
        nothing: list[ChunkKV | None] = [None] * len(keys)
        found = self.ask(lambda store: store.get_many(keys, layerwise=layerwise), nothing)
        return [None if key in self._stale else kv for key, kv in zip(keys, found, strict=True)]

    def put(self, kv: ChunkKV) -> bool:
        """Puts an entry; where it is not taken, the older one is dropped, now or, if nobody answers, in effect."""
        kept = self.ask(lambda store: store.put(kv), False)
        if kept:
            self._stale.discard(kv.key)
        elif not self.ask(lambda store: store.delete(kv.key), False):
            self._stale.add(kv.key)  # there was none, or the store could not be told
        return kept

    def put_as(self, own: ChunkKV, read: ChunkKV) -> bool:
        """Puts an entry, or what other tiers will give back for it where this one loses nothing: an entry must not
        change with the tier it comes from."""
        return self.put(own if self._loses else read)

    def delete(self, key: str) -> bool:
        return self.ask(lambda store: store.delete(key), False) and key not in self._stale

    def pin(self, key: str) -> bool:
        return key not in self._stale and self.ask(lambda store: store.pin(key), False)

    def holds(self, key: object) -> bool:
        return key not in self._stale and self.ask(lambda store: key in store, False)

    def listed(self) -> list[str]:
        nothing: list[str] = []
        return [key for key in self.ask(lambda store: list(store.keys()), nothing) if key not in self._stale]


class _Promoting(LayerSequence):
    """Layers that come from below as they are asked for, and are kept; once all are there, ``done`` is told."""

    def __init__(self, kv: ChunkKV, done: Callable[[ChunkKV], None]) -> None:
        self.stored_bytes = kv.layers.stored_bytes if isinstance(kv.layers, LayerSequence) else 0
        self._kv = kv
        self._done = done
        self._known: dict[int, Pair] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kv.layers)

    def layer(self, index: int) -> Pair:
        with self._lock:
            if index not in self._known:
                self._known[index] = self._kv.layers[index]
                if len(self._known) == len(self):
                    self._done(self._kv.with_layers(tuple(self._known[i] for i in range(len(self)))))
            return self._known[index]


def _common_codec(tiers: Sequence[Store]) -> str:
    """The one lossy codec among those of the tiers, or ``none``; packing without loss changes nothing."""
    lossy = {codec_by_name(store.codec).loss for store in tiers} - {"none"}
    if len(lossy) > 1:
        raise StoreError(
            f"the tiers have the codecs {', '.join(sorted(lossy))}, each of which loses other digits: "
            "an entry would change with the tier it comes from. Give them one, or leave it out in some"
        )
    return lossy.pop() if lossy else "none"


def _own_copy(kv: ChunkKV) -> ChunkKV:
    """What the caller does with its tensors later must not reach an entry that waits; nor should it hold GPU memory."""
    return kv.with_layers(tuple((keys.to("cpu", copy=True), values.to("cpu", copy=True)) for keys, values in kv.layers))


def _put_all(tiers: Sequence[_Tier], own: ChunkKV, read: ChunkKV) -> bool:
    """Puts an entry into every tier; whether any took it."""
    return sum(tier.put_as(own, read) for tier in tiers) > 0


def _slot(key: str) -> int:
    return hash(key) % _SLOTS
