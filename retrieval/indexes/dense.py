"""Dense retrieval: the texts whose vectors point most the way of the query's. Exact search, no training."""

from __future__ import annotations

from collections.abc import Sequence

import faiss

from retrieval.embed import Embedder
from retrieval.indexes.base import Match, at_least_one

__all__ = ["DenseIndex"]


class DenseIndex:
    """Texts by the cosine of their vectors, in a flat FAISS index.

    Args:
        embedder: makes the vectors of texts and queries.
    """

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self._index = faiss.IndexFlatIP(embedder.dimension)  # of unit vectors the inner product is the cosine

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def add(self, texts: Sequence[str]) -> None:
        """Adds texts; they are numbered from ``len(self)`` on."""
        self._index.add(self._embedder.encode(texts))

    def search(self, query: str, k: int) -> list[Match]:
        """The ``k`` most similar texts, best first; all of them where there are fewer.

        Raises:
            SettingError: ``k`` below 1.
        """
        at_least_one(k)
        scores, indices = self._index.search(self._embedder.encode([query]), min(k, max(1, len(self))))
        # FAISS fills up with -1 where there is nothing.
        return [Match(int(i), float(s)) for i, s in zip(indices[0], scores[0], strict=True) if i >= 0]
