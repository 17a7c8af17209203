"""The simplest prefix cache: whole sequences, compared one by one, least recently used out first. The reference."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from blend.chunk import KVLayers, kv_bytes
from blend.errors import BudgetError
from blend.prefix.base import PrefixCache, PrefixHit, PrefixStats

__all__ = ["LinearPrefixCache"]


class LinearPrefixCache(PrefixCache):
    """Exact for any number of entries and quick for the few dozen that fit in memory.

    A shared beginning is stored once per sequence. A hit holds its tensors itself, so locks have nothing to do.

    Args:
        limit: bytes of keys and values.
    """

    def __init__(self, limit: int = 1 << 30) -> None:
        if limit <= 0:
            raise BudgetError(f"limit is {limit} bytes: a prefix cache needs a positive one, such as 1 << 30")
        self.limit = limit
        self._entries: dict[tuple[str, bytes], tuple[np.ndarray, KVLayers]] = {}  # oldest first
        self._counts = [0, 0, 0]  # rows matched, asked for, evicted
        self._lock = threading.Lock()

    def match(self, ids: Sequence[int], *, extra: str = "", lock: bool = False) -> PrefixHit | None:
        wanted = np.asarray(ids, dtype=np.int64)
        best, best_key = 0, None
        with self._lock:
            for key, (known, _) in self._entries.items():
                rows = _common(wanted, known) if key[0] == extra else 0
                if rows > best:
                    best, best_key = rows, key
            self._counts[0] += best
            self._counts[1] += wanted.size
            if best_key is None:
                return None
            entry = self._entries.pop(best_key)
            self._entries[best_key] = entry  # now the youngest
        return PrefixHit(best, lambda: tuple((keys[:, :best], values[:, :best]) for keys, values in entry[1]))

    def insert(self, ids: Sequence[int], layers: KVLayers, *, extra: str = "") -> int:
        added = np.array(ids, dtype=np.int64)
        if not added.size or kv_bytes(layers) > self.limit:
            return 0
        own = tuple((keys.clone(), values.clone()) for keys, values in layers)
        with self._lock:
            longest = 0
            for key, (known, _) in list(self._entries.items()):
                common = _common(added, known) if key[0] == extra else 0
                longest = max(longest, common)
                if common == added.size:
                    return 0  # already there, as (part of) a longer entry
                if common and common == known.size:
                    del self._entries[key]  # the new entry contains it
            self._entries[extra, added.tobytes()] = (added, own)
            self._shrink(self.limit)
        return int(added.size) - longest

    def unlock(self, hit: PrefixHit) -> None:
        pass

    def evict(self, nbytes: int) -> int:
        with self._lock:
            before = self.nbytes
            self._shrink(max(before - nbytes, 0))
            return before - self.nbytes

    def stats(self) -> PrefixStats:
        with self._lock:
            rows = sum(ids.size for ids, _ in self._entries.values())
            return PrefixStats(rows, rows, self.nbytes, *self._counts)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values held."""
        return sum(kv_bytes(layers) for _, layers in self._entries.values())

    def check(self) -> None:
        with self._lock:
            assert self.nbytes <= self.limit
            known = [(extra, ids) for (extra, _), (ids, _) in self._entries.items()]
            for i, (extra, a) in enumerate(known):
                others = [b for other, b in known[i + 1 :] if other == extra]
                assert all(_common(a, b) < min(a.size, b.size) for b in others), "an entry contains another"
            for ids, layers in self._entries.values():
                assert all(keys.shape[1] == values.shape[1] == ids.size for keys, values in layers)

    def _shrink(self, limit: int) -> None:
        while self.nbytes > limit and self._entries:
            ids, _ = self._entries.pop(next(iter(self._entries)))
            self._counts[2] += ids.size


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix."""
    size = min(a.size, b.size)
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if different.size else size
