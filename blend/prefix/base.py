"""The plain prefix cache: exact KV of token sequences, found by their longest common prefix. Knows no chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from blend.chunk import KVLayers

__all__ = ["PrefixCache", "PrefixHit", "PrefixStats"]


class PrefixHit:
    """The longest known prefix.

    Args:
        rows: its tokens, at least 1.
        gather: reads its KV; called at most once.
        handle: what the cache needs to lock and unlock it.
    """

    def __init__(self, rows: int, gather: Any, handle: Any = None) -> None:
        self.rows = rows
        self.handle = handle
        self._gather = gather

    @cached_property
    def layers(self) -> KVLayers:
        """KV of the prefix, ``[H, rows, D]`` per layer; not to be written to."""
        layers: KVLayers = self._gather()
        return layers


class PrefixStats(NamedTuple):
    """What a prefix cache holds and has done.

    Attributes:
        stored_rows: rows whose KV is held.
        logical_rows: rows of all sequences held, shared beginnings counted once per sequence.
        nbytes: bytes of keys and values held.
        matched_rows: rows found so far.
        asked_rows: rows looked for so far.
        evicted_rows: rows dropped to make room so far.
    """

    stored_rows: int
    logical_rows: int
    nbytes: int
    matched_rows: int
    asked_rows: int
    evicted_rows: int

    @property
    def dedup_ratio(self) -> float:
        """Rows held per row stored: how much sharing saves; 1.0 when empty."""
        return self.logical_rows / self.stored_rows if self.stored_rows else 1.0

    @property
    def hit_rate(self) -> float:
        """Share of the rows looked for that were found."""
        return self.matched_rows / self.asked_rows if self.asked_rows else 0.0


class PrefixCache(ABC):
    """Only exact KV goes in: what a plain forward pass over exactly these tokens, from position 0, has computed.

    Safe to share by threads. Sequences of different ``extra`` never meet: it holds whatever else KV depends on, or must
    be kept apart by (tenant salt, adapter id, image hash).

    Attributes:
        granularity: rows of a hit are a multiple of it.
    """

    granularity: int = 1

    @abstractmethod
    def match(self, ids: Sequence[int], *, extra: str = "", lock: bool = False) -> PrefixHit | None:
        """The longest prefix of ``ids`` that is known, or None.

        Args:
            lock: keep its KV from being evicted until :meth:`unlock`; it is read when ``hit.layers`` is first asked
                for, which must be before that. Without, it is read before this returns.
        """

    @abstractmethod
    def insert(self, ids: Sequence[int], layers: KVLayers, *, extra: str = "") -> int:
        """Adds the exact KV of ``ids`` (``[H, len(ids), D]`` per layer); a copy is kept.

        What does not fit is left out, from the end. Returns the rows that were new and are stored.
        """

    @abstractmethod
    def unlock(self, hit: PrefixHit) -> None:
        """Gives a locked hit back; once per hit."""

    @abstractmethod
    def evict(self, nbytes: int) -> int:
        """Frees at least ``nbytes`` bytes, as far as nothing is locked; returns the bytes freed."""

    @abstractmethod
    def stats(self) -> PrefixStats:
        """What it holds and has done."""

    @abstractmethod
    def check(self) -> None:
        """Raises AssertionError when an internal invariant is broken."""
