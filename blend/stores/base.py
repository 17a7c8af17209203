"""The store: five verbs from content key to chunk KV. Knows nothing of RoPE, attention or models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from blend.chunk import ChunkKV

__all__ = ["Store"]


class Store(ABC):
    """Maps content keys to chunk KV. An absent entry is a miss (None), never an error. Safe to share by threads."""

    @abstractmethod
    def get(self, key: str) -> ChunkKV | None:
        """The entry, or None. Callers must not write into its tensors."""

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
