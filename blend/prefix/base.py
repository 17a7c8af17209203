"""The plain prefix cache: exact KV of token sequences, found by their longest common prefix. Knows no chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from blend.chunk import KVLayers

__all__ = ["PrefixCache", "PrefixHit"]


class PrefixHit(NamedTuple):
    """The longest known prefix: ``rows`` tokens and their KV (views ``[H, rows, D]``, not to be written to)."""

    rows: int
    layers: KVLayers


class PrefixCache(ABC):
    """Only exact KV goes in: what a plain forward pass over exactly these tokens, from position 0, has computed."""

    @abstractmethod
    def match(self, ids: Sequence[int]) -> PrefixHit | None:
        """The longest prefix of ``ids`` that is known, or None."""

    @abstractmethod
    def insert(self, ids: Sequence[int], layers: KVLayers) -> None:
        """Adds the exact KV of ``ids`` (``[H, len(ids), D]`` per layer)."""

    @abstractmethod
    def check(self) -> None:
        """Raises AssertionError when an internal invariant is broken."""
