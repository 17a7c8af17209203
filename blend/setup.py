"""What every request of one Blender shares, and the look-ups over it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Literal, NamedTuple

import torch

from blend.afterwards import Afterwards
from blend.chunk import DEFAULT_RETENTION, Chunk, ChunkKV, KVLayers, Retention
from blend.encode import EncodePlan, Lead, batches, encode_chunks, require_room
from blend.flight import SingleFlight
from blend.leads import Leads
from blend.loading import Loading
from blend.naming import Naming
from blend.pace import Pace
from blend.prefix import PrefixCache, PrefixHit
from blend.prompt import Prompt
from blend.readings import Reading, Wanted
from blend.stores.codecs import codec_by_name

__all__ = ["Found", "OnMiss", "Setup"]

_MISSED = "not in the store: encoded now and kept"
_REFUSED = "not in the store: encoded now; the store did not take it"

OnMiss = Literal["encode", "prefill"]


class Found(NamedTuple):
    """One chunk's KV in one reading, and how it was come by."""

    want: Wanted
    kv: ChunkKV
    encoded: bool
    why: str


@dataclass(frozen=True, kw_only=True)
class Setup(Naming):
    """Model, caches and keys of one Blender.

    Attributes:
        prefix: exact prefix KV.
        on_miss: encode a missing chunk and fuse, or prefill now and encode afterwards.
        loading: let the loading controller raise the ratio, and encode what is slow to read.
        overlap: read a slow store's layers while earlier ones compute.
        flights: chunks that are being encoded right now.
        pace: measured speeds.
        afterwards: what is encoded when no request is under way.
        leads: KV of what chunks are averaged behind.
    """

    prefix: PrefixCache
    on_miss: OnMiss = "encode"
    loading: Loading = "plain"
    overlap: bool = True
    flights: SingleFlight[ChunkKV] = field(default_factory=SingleFlight)
    pace: Pace = field(default_factory=Pace)
    afterwards: Afterwards = field(default_factory=Afterwards)
    leads: Leads = field(default_factory=Leads)

    # --- the prefix path --------------------------------------------------------------------------

    def longest_prefix(self, prompt: Prompt) -> PrefixHit | None:
        """The longest exact prefix known, short of the last row.

        None where :meth:`remembers` says that no prefix can be exact.
        """
        return self.prefix.match(prompt.ids[:-1], extra=self._extra) if self.remembers(len(prompt)) else None

    def known_rows(self, ids: Sequence[int]) -> int:
        """Rows of the longest exact prefix of ``ids`` that is known; its KV is not read."""
        # A locked hit is not read before it is asked for.
        hit = self.prefix.match(ids, extra=self._extra, lock=True)
        if hit is None:
            return 0
        self.prefix.unlock(hit)
        return hit.rows

    def remember(self, ids: Sequence[int], layers: KVLayers) -> None:
        """Keeps the exact KV of ``ids`` for prompts that start with them."""
        if self.remembers(len(ids)):
            self.prefix.insert(ids, layers, extra=self._extra)

    def remembers(self, rows: int) -> bool:
        """Whether the KV of a pass of ``rows`` rows may be taken from the prefix cache, and go into it.

        Not where angles depend on the length of the pass (longrope; dynamic NTK beyond its original length).
        """
        rope = self.view.rope
        return not rope.by_length and rope.serves(rows)

    @property
    def _extra(self) -> str:
        """What keeps exact KV apart besides tokens: tenant and adapter, and whose weights they are."""
        return "\0".join((self.fingerprint, self.adapter, self.salt))

    # --- the chunk store --------------------------------------------------------------------------

    def fetch(self, wanted: Iterable[Wanted], system: tuple[int, ...]) -> dict[Wanted, ChunkKV]:
        """What the store holds of that; layers of slow stores are read later.

        Entries that are not this model's KV of this chunk count as misses and are removed.
        """
        wanted = list(wanted)
        keys = [self.plan(system, reading).key(chunk) for chunk, reading in wanted]
        entries = self.store.get_many(keys, layerwise=True)
        return {
            want: kv for want, kv in zip(wanted, entries, strict=True) if kv is not None and self._ours(kv, want.chunk)
        }

    def missing(self, chunks: Iterable[Chunk], system: tuple[int, ...]) -> list[Chunk]:
        """Those chunks of which the store lacks KV that any prompt may ask for; nothing is read."""
        plans = [self.plan(system, reading) for reading in self.readings(again=False)]
        return [chunk for chunk in chunks if any(plan.key(chunk) not in self.store for plan in plans)]

    def forget(self, chunks: Sequence[Chunk], system: tuple[int, ...]) -> int:
        """Removes what is kept of chunks; returns how many the store held.

        The prefix cache is emptied: it knows rows of whole prompts, and not whose they are.
        """
        if not chunks:
            return 0
        keys = [self.keys(chunk, system) for chunk in chunks]
        self.afterwards.cancel(keys)
        self.prefix.evict(self.prefix.stats().nbytes)
        deleted = [list(map(self.store.delete, of_chunk)) for of_chunk in keys]
        return sum(map(any, deleted))

    def encode(
        self,
        wanted: Iterable[Wanted],
        system: tuple[int, ...],
        retention: Retention = DEFAULT_RETENTION,
        stale: Collection[Wanted] = (),
    ) -> Iterator[Found]:
        """Encodes chunks behind their prelude and puts each into the store as soon as its batch is done.

        What another thread is encoding right now is waited for, and what has come into the store in the meantime is
        read: the same chunk is encoded once.

        Args:
            retention: for eviction; its cost is measured here.
            stale: what is not to be taken from the store, though it may be there.
        """
        by_key = {self.plan(system, want.reading).key(want.chunk): want for want in wanted}
        while by_key:
            mine, others = self.flights.claim(tuple(by_key))
            try:
                fresh = [by_key[str(name)] for name in mine]
                known = self.fetch([want for want in fresh if want not in stale], system)
                found = (Found(want, kv, False, "found in the store") for want, kv in known.items())
                for item in chain(found, self._encode([w for w in fresh if w not in known], system, retention)):
                    self.flights.land(item.kv.key, item.kv)
                    del by_key[item.kv.key]
                    yield item
            finally:
                for name in mine:
                    self.flights.land(name, None)  # whoever waits does it himself
            for name, flight in others.items():
                landed = flight.result()
                if landed is not None:
                    yield Found(by_key.pop(str(name)), landed, False, "another request was encoding it: waited for")

    def encode_afterwards(
        self, chunks: Sequence[Chunk], system: tuple[int, ...], again: Collection[Chunk] = ()
    ) -> None:
        """Encodes chunks, those of ``again`` behind themselves too, when no request is under way."""
        for chunk in chunks:
            job = partial(self._encode_one, chunk, system, chunk in again)
            self.afterwards.add(self.keys(chunk, system), job)

    def _encode_one(self, chunk: Chunk, system: tuple[int, ...], again: bool) -> None:
        for _ in self.encode_fully([chunk], system, again=[chunk] if again else ()):
            pass

    def encode_fully(
        self,
        chunks: Sequence[Chunk],
        system: tuple[int, ...],
        retention: Retention = DEFAULT_RETENTION,
        again: Collection[Chunk] = (),
    ) -> Iterator[tuple[Found, ...]]:
        """All that is kept of each chunk, like :meth:`encode`: its KV alone, and its mean if there is a background.

        They come batch by batch: who is interrupted has whole chunks in the store.

        Args:
            again: chunks that are read behind themselves too.

        Raises:
            PromptTooLong: a chunk that does not fit the model, before anything is encoded.
        """
        require_room(self.view, chunks, self.plan(system).prelude)
        for batch in batches(sorted(chunks, key=len), self.batch_rows):
            asked = {chunk: self.readings(chunk in again) for chunk in batch}
            done: dict[Chunk, list[Found]] = {chunk: [] for chunk in batch}
            for reading in self.readings(again=True):
                wanted = (Wanted(chunk, reading) for chunk in batch if reading in asked[chunk])
                for found in self.encode(wanted, system, retention):
                    done[found.want.chunk].append(found)
                    if len(done[found.want.chunk]) == len(asked[found.want.chunk]):
                        yield tuple(done[found.want.chunk])

    def _encode(self, wanted: Iterable[Wanted], system: tuple[int, ...], retention: Retention) -> Iterator[Found]:
        by_reading: dict[Reading, list[Chunk]] = {}
        for chunk, reading in wanted:
            by_reading.setdefault(reading, []).append(chunk)
        for reading, chunks in by_reading.items():
            plan = self.plan(system, reading)
            by_ids = {chunk.ids: chunk for chunk in chunks}
            for kv in encode_chunks(self.view, chunks, plan, self._leads(plan)):
                kept = replace(kv, retention=retention._replace(cost=kv.retention.cost))
                why = _MISSED if self.store.put(kept) else _REFUSED
                yield Found(Wanted(by_ids[kv.ids], reading), self._as_read(kept), True, why)

    def _as_read(self, kv: ChunkKV) -> ChunkKV:
        """As a later hit will see it, so that the first answer is the same as the second."""
        return kv.with_layers(codec_by_name(self.store.codec).round_trip(kv.layers))

    def _ours(self, kv: ChunkKV, chunk: Chunk) -> bool:
        """Whether an entry is what its key says; keys are hashes, but stores are shared."""
        if kv.fingerprint == self.fingerprint and kv.ids == chunk.ids and len(kv.layers) == len(self.view.kv_like):
            return True
        self.store.stats.add(foreign=1)
        self.store.delete(kv.key)
        return False

    def learn_prelude(self, system: tuple[int, ...], known: int) -> bool:
        """Computes the prelude of prompts with this system part, unless ``known`` rows are all that can be kept of it.

        Returns whether there was something to compute.
        """
        prelude = self.plan(system).prelude
        keepable = len(prelude) // self.prefix.granularity * self.prefix.granularity
        return known < keepable and self._prelude_kv(prelude) is not None

    def _leads(self, plan: EncodePlan) -> tuple[Lead, ...]:
        prelude = Lead(plan.prelude, self._prelude_kv(plan.prelude))
        return self.leads.of(self.view, plan, prelude, self.remembers) if plan.background else (prelude,)

    def _prelude_kv(self, prelude: tuple[int, ...]) -> KVLayers | None:
        """Exact KV of the prelude, computed once; also the first rows of every prompt that starts with it."""
        if not prelude or not self.remembers(len(prelude)):
            return None
        hit = self.prefix.match(prelude, extra=self._extra)
        if hit is not None and hit.rows == len(prelude):
            return hit.layers
        _, layers = self.view.prefill(torch.tensor([prelude]))
        own = tuple((keys[0], values[0]) for keys, values in layers)
        self.remember(prelude, own)
        return own
