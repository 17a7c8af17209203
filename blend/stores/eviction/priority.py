"""Priority first, then least recently used."""

from __future__ import annotations

from blend.chunk import DEFAULT_PRIORITY
from blend.stores.eviction.base import Entry, Policy, Score

__all__ = ["Priority"]


class Priority(Policy):
    """Lower priorities leave first; among equals, the entry whose last use is longest ago.

    TensorRT-LLM's retention: 0 to 100, 35 where none is given, and for a limited time where a duration is given. There
    the time runs anew whenever a block is released; here it runs from the put. Keeps nothing in itself.
    """

    name = "priority"
    timed = True

    def score(self, entry: Entry) -> Score:
        over = entry.expires is not None and entry.expires <= entry.used
        return DEFAULT_PRIORITY if over else entry.priority, entry.used
