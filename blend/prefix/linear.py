"""The simplest prefix cache: whole sequences, compared one by one, least recently used out first."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from blend.chunk import KVLayers, kv_bytes
from blend.errors import BudgetError
from blend.prefix.base import PrefixCache, PrefixHit

__all__ = ["LinearPrefixCache"]


class LinearPrefixCache(PrefixCache):
    """Exact for any number of entries and quick for the few dozen that fit in memory.

    Args:
        limit: bytes of keys and values.
    """

    def __init__(self, limit: int = 1 << 30) -> None:
        if limit <= 0:
            raise BudgetError(f"limit is {limit} bytes: a prefix cache needs a positive one, such as 1 << 30")
        self.limit = limit
        self._entries: dict[bytes, tuple[np.ndarray, KVLayers]] = {}  # oldest first
        self._lock = threading.Lock()

    def match(self, ids: Sequence[int]) -> PrefixHit | None:
        wanted = np.asarray(ids, dtype=np.int64)
        best, best_key = 0, None
        with self._lock:
            for key, (known, _) in self._entries.items():
                rows = _common(wanted, known)
                if rows > best:
                    best, best_key = rows, key
            if best_key is None:
                return None
            entry = self._entries.pop(best_key)
            self._entries[best_key] = entry  # now the youngest
        return PrefixHit(best, tuple((keys[:, :best], values[:, :best]) for keys, values in entry[1]))

    def insert(self, ids: Sequence[int], layers: KVLayers) -> None:
        added = np.array(ids, dtype=np.int64)
        if not added.size or kv_bytes(layers) > self.limit:
            return
        with self._lock:
            for key, (known, _) in list(self._entries.items()):
                common = _common(added, known)
                if common == added.size:
                    return  # already there, as (part of) a longer entry
                if common == known.size:
                    del self._entries[key]  # the new entry contains it
            self._entries[added.tobytes()] = (added, layers)
            while self.nbytes > self.limit:
                del self._entries[next(iter(self._entries))]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values held."""
        return sum(kv_bytes(layers) for _, layers in self._entries.values())

    def check(self) -> None:
        with self._lock:
            assert self.nbytes <= self.limit
            known = [ids for ids, _ in self._entries.values()]
            for i, a in enumerate(known):
                assert all(_common(a, b) < min(a.size, b.size) for b in known[i + 1 :]), "an entry contains another"
            for ids, layers in self._entries.values():
                assert all(keys.shape[1] == values.shape[1] == ids.size for keys, values in layers)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix."""
    size = min(a.size, b.size)
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if different.size else size
