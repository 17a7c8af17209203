"""Layers that are read one by one, counted, and reported once when one is damaged."""

from __future__ import annotations

import time
from collections.abc import Callable

from blend.errors import CorruptEntry
from blend.stores.base import StoreStats
from blend.stores.entry import Bytes, Head, LazyLayers
from blend.stores.lazy import Pair

__all__ = ["WatchedLayers"]


class WatchedLayers(LazyLayers):
    """Layers of an entry that lies at hand, in a file or elsewhere.

    Args:
        head: of the entry.
        read: a layer's bytes.
        stats: where bytes and seconds are counted.
        damaged: told of the first layer that is not what was written, before the reader is.
    """

    def __init__(
        self,
        head: Head,
        read: Callable[[int], Bytes],
        stats: StoreStats,
        damaged: Callable[[CorruptEntry], None],
    ) -> None:
        super().__init__(head, read)
        self._stats = stats
        self._damaged: Callable[[CorruptEntry], None] | None = damaged

    def layer(self, index: int) -> Pair:
        begin = time.perf_counter()
        try:
            pair = super().layer(index)
        except CorruptEntry as error:
            report, self._damaged = self._damaged, None
            if report is not None:
                report(error)
            raise
        start, stop = self.head.spans[index]
        self._stats.add(bytes_read=stop - start, read_seconds=time.perf_counter() - begin)
        return pair
