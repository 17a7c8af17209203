"""The two ways to find KV again, as a replay drives them: by exact prefix, and by chunk wherever it stands.

Both answer a request first and store what was missing afterwards, as one engine that serves one request at a time does.
A limit counts bytes of KV; what is really held is a byte or two per page, so that a replay of terabytes fits in memory.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from blend.chunk import KVLayers
from blend.prefix import BlockPrefixCache, PrefixCache, RadixPrefixCache
from blend.stores.eviction import Entry, EvictionQueue, Policy, Score, policy_by_name
from eval.replay.traces import Request, Trace

__all__ = ["PREFIX_CACHES", "ChunkPath", "PrefixPath", "percentiles"]

PREFIX_CACHES: dict[str, Callable[[int, int, Policy], PrefixCache]] = {
    "radix": lambda limit, page, policy: RadixPrefixCache(limit, policy=policy),
    "block": lambda limit, page, policy: BlockPrefixCache(limit, block=16 if page == 1 else 1, policy=policy),
}
"""Prefix caches by name, given the limit in bytes, the rows that a token stands for, and the policy."""

_PAGE_BYTES = 2  # one of keys and one of values


class PrefixPath:
    """A real prefix cache over the requests' pages: for Mooncake a block of 512 rows is a token to it, else a row is.

    Args:
        trace: what is replayed.
        kind: of :data:`PREFIX_CACHES`.
        policy: name of who leaves first.
        page_limit: pages of ``trace.page`` rows that may be held; None for all.
        clock: the trace's seconds.
    """

    def __init__(
        self, trace: Trace, kind: str, policy: str, page_limit: int | None, clock: Callable[[], float]
    ) -> None:
        self._trace = trace
        pages = trace.input_rows if page_limit is None else page_limit
        limit = max(pages, 1) * _PAGE_BYTES
        self._cache = PREFIX_CACHES[kind](limit, trace.page, _OnTraceTime(policy_by_name(policy), clock))
        self.found_rows = 0
        self.nanoseconds = array("q")

    def serve(self, request: Request) -> None:
        """One request: the longest prefix, then the rest is put in."""
        ids = self._trace.tokens(request)
        begin = time.perf_counter_ns()
        hit = self._cache.match(ids, lock=True)
        self.nanoseconds.append(time.perf_counter_ns() - begin)
        if hit is not None:
            # Only a request's last page is not full.
            self.found_rows += min(hit.rows * self._trace.page, sum(request.rows))
        self._cache.insert(ids, _layers(len(ids)))
        if hit is not None:
            self._cache.unlock(hit)

    def figures(self, bytes_per_row: int) -> dict[str, Any]:
        """Plain data: bytes held, dedup ratio, rows evicted."""
        stats = self._cache.stats()
        return {
            "prefix_hit_rate": self.found_rows / self._trace.input_rows,
            "prefix_bytes": stats.stored_rows * self._trace.page * bytes_per_row,
            "prefix_dedup_ratio": stats.dedup_ratio,
            "prefix_evicted_rows": stats.evicted_rows * self._trace.page,
        }


class ChunkPath:
    """A store of chunks: an eviction queue in front of nothing.

    All of a request's chunks are looked up before the missing ones are put, so that a chunk which stands in one request
    twice is found twice or missed twice.

    Args:
        trace: what is replayed.
        policy: name of who leaves first.
        page_limit: pages of ``trace.page`` rows that may be held; None for all.
        clock: the trace's seconds.
    """

    def __init__(self, trace: Trace, policy: str, page_limit: int | None, clock: Callable[[], float]) -> None:
        self._trace = trace
        self._limit = trace.input_rows if page_limit is None else page_limit
        self._queue = EvictionQueue(policy_by_name(policy), clock)
        self.found_rows = self.evictions = self.refused = 0
        self.nanoseconds = array("q")

    def serve(self, request: Request) -> None:
        """One request: every chunk is looked up, then the missing ones are put in."""
        missing = []
        for chunk, rows in zip(request.chunks, request.rows, strict=True):
            begin = time.perf_counter_ns()
            found = chunk in self._queue
            if found:
                self._queue.use(chunk)
            self.nanoseconds.append(time.perf_counter_ns() - begin)
            if found:
                self.found_rows += rows
            else:
                missing.append(chunk)
        for chunk in dict.fromkeys(missing):
            self._put(chunk)

    def figures(self, bytes_per_row: int) -> dict[str, Any]:
        """Plain data: bytes held, dedup ratio (how often a page held was asked for), entries evicted and refused."""
        held = [entry for entry in map(self._queue.get, self._queue) if entry is not None]
        asked = sum(entry.uses * entry.nbytes for entry in held)
        return {
            "chunk_hit_rate": self.found_rows / self._trace.input_rows,
            "chunk_bytes": self._queue.nbytes * self._trace.page * bytes_per_row,
            "chunk_dedup_ratio": asked / self._queue.nbytes if self._queue.nbytes else 1.0,
            "chunk_evictions": self.evictions,
            "chunk_refused": self.refused,
        }

    def _put(self, chunk: int) -> None:
        pages = self._trace.pages(chunk)
        if pages > self._limit:
            self.refused += 1
            return
        while self._queue.nbytes + pages > self._limit:
            self._queue.evict()
            self.evictions += 1
        # No cost is given: a row of one chunk takes about as long to compute as a row of another.
        self._queue.add(chunk, pages)


class _OnTraceTime(Policy):
    """A policy that reads the trace's clock where a prefix cache has read the machine's."""

    def __init__(self, inner: Policy, clock: Callable[[], float]) -> None:
        self.name, self.timed = inner.name, inner.timed
        self._inner = inner
        self._clock = clock

    def score(self, entry: Entry) -> Score:
        entry.used = self._clock()
        return self._inner.score(entry)

    def evicted(self, entry: Entry) -> None:
        self._inner.evicted(entry)


def percentiles(nanoseconds: array[int]) -> dict[str, float]:
    """p50, p90 and p99 in microseconds; empty when nothing was looked up."""
    if not nanoseconds:
        return {}
    values = np.percentile(np.asarray(nanoseconds) / 1000, (50, 90, 99))
    return dict(zip(("p50", "p90", "p99"), map(float, values), strict=True))


def _layers(pages: int) -> KVLayers:
    """KV of one byte a page."""
    zeros = torch.zeros(1, pages, 1, dtype=torch.uint8)
    return ((zeros, zeros),)
