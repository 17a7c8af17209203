"""The loading controller: what hides a load, and when loading is not worth it (CacheBlend, arXiv 2405.16444, sec. 5).

While layer i computes, layer i + 1 is read. A load is hidden where reading a layer takes no longer than computing the
chosen rows of one; and where encoding a chunk anew takes less time than reading it, reading is a waste.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from blend.chunk import ChunkKV
from blend.selectors import Selector
from blend.selectors.base import BudgetedSelector
from blend.stores.lazy import LayerSequence

__all__ = ["LoadPlan", "LoadReport", "Loading", "stored_bytes", "with_ratio"]

Loading = Literal["plain", "adapt"]


@dataclass(frozen=True)
class LoadReport:
    """What reading stored layers cost one request.

    Attributes:
        nbytes: bytes read, as stored; 0 where everything was in memory.
        seconds: spent reading, checking, decoding and moving.
        waited: seconds of these that the request stood still for.
        hiding_ratio: smallest recompute ratio whose computing would hide the load; None where nothing was read, or
            the model's speed is not known yet.
    """

    nbytes: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    hiding_ratio: float | None = None


@dataclass(frozen=True)
class LoadPlan:
    """Estimates for one request.

    Args:
        full_seconds: a full prefill of this prompt, or None where unknown.
        byte_seconds: seconds that reading one stored byte has taken so far (decoded and moved), or None.
    """

    full_seconds: float | None
    byte_seconds: float | None

    def load_seconds(self, kvs: Sequence[ChunkKV]) -> float | None:
        """Reading all of them."""
        return sum(map(stored_bytes, kvs)) * self.byte_seconds if self.byte_seconds else None

    def hiding_ratio(self, kvs: Sequence[ChunkKV]) -> float | None:
        """Share of rows whose computing takes as long as the load, at most 1.0."""
        load = self.load_seconds(kvs)
        return min(load / self.full_seconds, 1.0) if load and self.full_seconds else None

    def better_encoded(self, kv: ChunkKV) -> bool:
        """Whether computing this chunk anew (as long as it took before) is cheaper than reading it."""
        load = self.load_seconds([kv])
        return load is not None and 0.0 < kv.retention.cost < load


def stored_bytes(kv: ChunkKV) -> int:
    """Bytes that have yet to be read for it."""
    return kv.layers.stored_bytes if isinstance(kv.layers, LayerSequence) else 0


def with_ratio(selector: Selector, ratio: float | None) -> Selector:
    """The selector with at least this recompute ratio, where it has one to raise."""
    if ratio is None or not isinstance(selector, BudgetedSelector) or selector.rows is not None:
        return selector
    return replace(selector, ratio=max(selector.ratio, ratio))
