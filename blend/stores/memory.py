"""A store in the process's own memory, least recently used out first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace

from blend.chunk import ChunkKV
from blend.errors import BudgetError
from blend.stores.base import Store

__all__ = ["MemoryStore"]


class MemoryStore(Store):
    """Keeps at most ``limit`` bytes of KV; entries used longest ago are dropped first.

    Args:
        limit: bytes of keys and values.

    Raises:
        BudgetError: the limit is not positive.
    """

    def __init__(self, limit: int = 4 << 30) -> None:
        if limit <= 0:
            raise BudgetError(f"limit is {limit} bytes: a memory store needs a positive one, such as 4 << 30")
        self.limit = limit
        self.nbytes = 0
        self.evicted = 0
        self._entries: OrderedDict[str, ChunkKV] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> ChunkKV | None:
        with self._lock:
            kv = self._entries.get(key)
            if kv is not None:
                self._entries.move_to_end(key)
            return kv

    def put(self, kv: ChunkKV) -> bool:
        if kv.nbytes > self.limit:
            return False
        # A copy: what the caller does with its tensors later must not reach the store.
        own = replace(kv, layers=tuple((keys.clone(), values.clone()) for keys, values in kv.layers))
        with self._lock:
            self._drop(kv.key)
            while self.nbytes + own.nbytes > self.limit:
                self._drop(next(iter(self._entries)))
                self.evicted += 1
            self._entries[kv.key] = own
            self.nbytes += own.nbytes
        return True

    def delete(self, key: str) -> bool:
        with self._lock:
            return self._drop(key)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def keys(self) -> Iterator[str]:
        with self._lock:
            return iter(list(self._entries))

    def _drop(self, key: str) -> bool:
        old = self._entries.pop(key, None)
        if old is not None:
            self.nbytes -= old.nbytes
        return old is not None
