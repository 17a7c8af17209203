"""Least recently used."""

from __future__ import annotations

from blend.stores.eviction.base import Entry, Policy, Score

__all__ = ["LRU"]


class LRU(Policy):
    """The entry whose last use is longest ago leaves first. Keeps nothing in itself."""

    name = "lru"

    def score(self, entry: Entry) -> Score:
        return 0, entry.used
