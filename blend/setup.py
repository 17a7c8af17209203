"""What every request of one Blender shares, and the look-ups over it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, NamedTuple

import torch

from blend.afterwards import Afterwards
from blend.chunk import DEFAULT_RETENTION, Chunk, ChunkKV, KVLayers, Retention
from blend.encode import EncodePlan, encode_chunks
from blend.flight import SingleFlight
from blend.hf.view import ModelView
from blend.loading import Loading
from blend.pace import Pace
from blend.prefix import PrefixCache, PrefixHit
from blend.prompt import Prompt
from blend.stores import Store
from blend.stores.codecs import codec_by_name

__all__ = ["Found", "OnMiss", "Prelude", "Setup"]

_MISSED = "not in the store: encoded now and kept"
_REFUSED = "not in the store: encoded now; the store did not take it"

Prelude = Literal["none", "bos", "system"]
OnMiss = Literal["encode", "prefill"]


class Found(NamedTuple):
    """One chunk's KV and how it was come by."""

    kv: ChunkKV
    encoded: bool
    why: str


@dataclass(frozen=True)
class Setup:
    """Model, caches and keys of one Blender.

    Attributes:
        view: the model.
        store: chunk KV.
        prefix: exact prefix KV.
        fingerprint: of model and tokenizer.
        prelude: what chunks are encoded behind.
        bos: the tokenizer's BOS ids, for ``prelude="bos"``.
        salt: tenant salt.
        batch_rows: rows per encoding pass.
        adapter: id of the adapter that the model runs with.
        on_miss: encode a missing chunk and fuse, or prefill now and encode afterwards.
        loading: let the loading controller raise the ratio, and encode what is slow to read.
        overlap: read a slow store's layers while earlier ones compute.
        flights: chunks that are being encoded right now.
        pace: measured speeds.
        afterwards: what is encoded when no request is under way.
    """

    view: ModelView
    store: Store
    prefix: PrefixCache
    fingerprint: str
    prelude: Prelude = "system"
    bos: tuple[int, ...] = ()
    salt: str = ""
    batch_rows: int = 1024
    adapter: str = ""
    on_miss: OnMiss = "encode"
    loading: Loading = "plain"
    overlap: bool = True
    flights: SingleFlight[ChunkKV] = field(default_factory=SingleFlight)
    pace: Pace = field(default_factory=Pace)
    afterwards: Afterwards = field(default_factory=Afterwards)

    @property
    def lossless(self) -> bool:
        """Whether the store gives back the very bits."""
        return codec_by_name(self.store.codec).lossless

    def plan(self, system: tuple[int, ...]) -> EncodePlan:
        """How the chunks of a prompt with this system part are encoded and named."""
        prelude = {"none": (), "bos": self.bos, "system": system}[self.prelude]
        loss = codec_by_name(self.store.codec).loss
        return EncodePlan(prelude, self.fingerprint, self.salt, self.batch_rows, loss, self.adapter)

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

    def fetch(self, chunks: Sequence[Chunk], system: tuple[int, ...]) -> dict[Chunk, ChunkKV]:
        """KV of those ``chunks`` that the store holds; layers of slow stores are read later.

        Entries that are not this model's KV of this chunk count as misses and are removed.
        """
        plan = self.plan(system)
        entries = self.store.get_many([plan.key(chunk) for chunk in chunks], layerwise=True)
        return {
            chunk: kv for chunk, kv in zip(chunks, entries, strict=True) if kv is not None and self._ours(kv, chunk)
        }

    def missing(self, chunks: Iterable[Chunk], system: tuple[int, ...]) -> list[Chunk]:
        """Those chunks that the store does not hold; nothing is read."""
        plan = self.plan(system)
        return [chunk for chunk in chunks if plan.key(chunk) not in self.store]

    def forget(self, chunks: Sequence[Chunk], system: tuple[int, ...]) -> int:
        """Removes what is kept of chunks; returns how many the store held.

        The prefix cache is emptied: it knows rows of whole prompts, and not whose they are.
        """
        if not chunks:
            return 0
        plan = self.plan(system)
        keys = [plan.key(chunk) for chunk in chunks]
        self.afterwards.cancel(keys)
        self.prefix.evict(self.prefix.stats().nbytes)
        return sum([self.store.delete(key) for key in keys])

    def drop(self, chunk: Chunk, system: tuple[int, ...]) -> None:
        """Removes an entry that turned out to be of no use."""
        self.store.delete(self.plan(system).key(chunk))

    def encode(
        self,
        chunks: Sequence[Chunk],
        system: tuple[int, ...],
        retention: Retention = DEFAULT_RETENTION,
        stale: Collection[Chunk] = (),
    ) -> Iterator[Found]:
        """Encodes chunks behind their prelude and puts each into the store as soon as its batch is done.

        A chunk that another thread is encoding right now is waited for, and one that has come into the store in the
        meantime is read: the same chunk is encoded once.

        Args:
            retention: for eviction; its cost is measured here.
            stale: chunks whose stored entry is not to be used.
        """
        plan = self.plan(system)
        by_key = {plan.key(chunk): chunk for chunk in chunks}
        while by_key:
            mine, others = self.flights.claim(tuple(by_key))
            try:
                fresh = [by_key[str(key)] for key in mine]
                known = self.fetch([chunk for chunk in fresh if chunk not in stale], system)
                for chunk, kv in known.items():
                    self.flights.land(plan.key(chunk), kv)
                    del by_key[plan.key(chunk)]
                    yield Found(kv, False, "found in the store")
                for found in self._encode([chunk for chunk in fresh if chunk not in known], plan, retention):
                    self.flights.land(found.kv.key, found.kv)
                    del by_key[found.kv.key]
                    yield found
            finally:
                for key in mine:
                    self.flights.land(key, None)  # whoever waits does it himself
            for key, flight in others.items():
                landed = flight.result()
                if landed is not None:
                    del by_key[str(key)]
                    yield Found(landed, False, "another request was encoding it: waited for")

    def encode_afterwards(self, chunks: Sequence[Chunk], system: tuple[int, ...]) -> None:
        """Encodes chunks when no request is under way."""
        plan = self.plan(system)
        for chunk in chunks:
            self.afterwards.add(plan.key(chunk), partial(self._encode_one, chunk, system))

    def _encode_one(self, chunk: Chunk, system: tuple[int, ...]) -> None:
        for _ in self.encode([chunk], system):
            pass

    def _encode(self, chunks: Sequence[Chunk], plan: EncodePlan, retention: Retention) -> Iterator[Found]:
        if not chunks:
            return
        for kv in encode_chunks(self.view, chunks, plan, self._prelude_kv(plan.prelude)):
            kept = replace(kv, retention=retention._replace(cost=kv.retention.cost))
            stored = self.store.put(kept)
            yield Found(self._as_read(kept), True, _MISSED if stored else _REFUSED)

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
