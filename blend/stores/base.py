"""The store: five verbs from content key to chunk KV. Knows nothing of RoPE, attention or models."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from blend.chunk import ChunkKV

__all__ = ["Store", "StoreStats"]


@dataclass
class StoreStats:
    """What a store has done since it was opened.

    Attributes:
        hits: entries handed out.
        misses: keys that were asked for and not there, damaged ones included.
        corrupt: entries found damaged, and removed.
        foreign: entries found under a key that is not theirs, or in a format of another version, and removed.
        evicted: entries dropped to make room.
        refused: entries that were not kept because they do not fit.
        failures: calls that the server or disk behind the store did not answer.
        bytes_read: bytes of entries, as stored.
        read_seconds: spent reading, checking and decoding them.
    """

    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    foreign: int = 0
    evicted: int = 0
    refused: int = 0
    failures: int = 0
    bytes_read: int = 0
    read_seconds: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, **counts: float) -> None:
        """Adds to the named counters; safe to call from several threads."""
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if not name.startswith("_")}


class Store(ABC):
    """Maps content keys to chunk KV. An absent entry is a miss (None), never an error. Safe to share by threads.

    Attributes:
        codec: name of the codec that entries go through; what it loses is part of every key (``none``: nothing).
    """

    codec: str = "none"

    @abstractmethod
    def get(self, key: str) -> ChunkKV | None:
        """The entry, checked, or None. Callers must not write into its tensors."""

    @abstractmethod
    def put(self, kv: ChunkKV) -> bool:
        """Stores a copy under ``kv.key``; False when it does not fit."""

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Removes an entry; False when there was none."""

    @abstractmethod
    def __contains__(self, key: object) -> bool:
        """Whether :meth:`get` would hit now."""

    @abstractmethod
    def keys(self) -> Iterator[str]:
        """The keys present, in no promised order."""

    def get_many(self, keys: Sequence[str], *, layerwise: bool = False) -> list[ChunkKV | None]:
        """One answer per key, in order.

        Args:
            layerwise: the layers of an entry may be read when they are asked for (``kv.layers[i]``), so that a slow
                store's layers arrive while earlier ones are computed with. Reading one then raises
                :class:`~blend.errors.CorruptEntry` where the entry turns out to be damaged, or gone.
        """
        return [self.get(key) for key in keys]

    def put_many(self, kvs: Sequence[ChunkKV]) -> list[bool]:
        """Stores several entries; one answer per entry, in order."""
        return [self.put(kv) for kv in kvs]

    def pin(self, key: str) -> bool:
        """Keeps an entry from being evicted until as many :meth:`unpin`; False when it is not there, or cannot be."""
        return False

    def unpin(self, key: str) -> bool:
        """Takes one pin off; False when there was none."""
        return False

    def close(self) -> None:  # noqa: B027  # most stores have nothing to finish
        """Finishes what runs in the background and lets go of files and connections. Twice is harmless."""

    @cached_property
    def stats(self) -> StoreStats:
        """Counters since the store was opened."""
        return StoreStats()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
