"""Dense retrieval: the texts whose vectors point most the way of the query's."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from retrieval.embed import Embeds
from retrieval.errors import IndexMismatch, SettingError
from retrieval.indexes.base import Index, Match, at_least_one, numbers_for
from retrieval.indexes.folder import open_folder, saving
from retrieval.indexes.vectors import VectorKind, Vectors

__all__ = ["DenseIndex"]


class DenseIndex(Index):
    """Texts by the cosine of their vectors, over FAISS.

    Args:
        embedder: makes the vectors of texts and queries.
        kind: ``flat`` is exact. ``ivf`` (inverted lists) and ``hnsw`` (a graph) look at a part of the vectors, for
            hundreds of thousands of texts and more; below 1,024 texts they are exact too. Removed vectors stay until
            they are a third of all, then the index is built anew from the rest.
        probes: lists that ``ivf`` looks into, at least; more find more, and take longer.

    Raises:
        SettingError: no such kind, or no probes.
    """

    name: ClassVar[str] = "dense"

    def __init__(self, embedder: Embeds, kind: VectorKind = "flat", *, probes: int = 16) -> None:
        self._embedder = embedder
        self._vectors = Vectors(embedder.dimension, kind, probes=probes)
        self._lock = threading.Lock()  # FAISS cannot be searched while it changes

    def __len__(self) -> int:
        return len(self._vectors)

    @property
    def kind(self) -> VectorKind:
        """``flat``, ``ivf`` or ``hnsw``."""
        return self._vectors.kind

    def numbers(self) -> Collection[int]:
        with self._lock:
            return frozenset(self._vectors.numbers())

    def add(self, texts: Sequence[str], numbers: Sequence[int] | None = None) -> None:
        numbers_for(len(texts), numbers, ())  # refused before the embedder has worked for it
        self.add_vectors(self._embedder.encode(texts), numbers)

    def add_vectors(self, vectors: NDArray[np.float32], numbers: Sequence[int] | None = None) -> None:
        """Adds texts by vectors that the embedder made of them before; otherwise like :meth:`add`.

        Args:
            vectors: ``[texts, dimension]``, of any length above 0.

        Raises:
            SettingError: another shape, or numbers that :meth:`add` would not take.
        """
        vectors = self._checked(np.asarray(vectors, dtype=np.float32), 2)
        with self._lock:
            self._vectors.add(vectors, numbers_for(len(vectors), numbers, self._vectors.numbers()))

    def remove(self, numbers: Collection[int]) -> int:
        with self._lock:
            return self._vectors.remove(numbers)

    def search(self, query: str, k: int) -> list[Match]:
        at_least_one(k)
        return self.search_vector(self._embedder.encode_query(query), k) if len(self) else []

    def search_vector(self, vector: NDArray[np.float32], k: int) -> list[Match]:
        """The ``k`` texts nearest to a vector ``[dimension]``, best first.

        Raises:
            SettingError: ``k`` below 1, or another shape.
        """
        at_least_one(k)
        vector = self._checked(np.asarray(vector, dtype=np.float32), 1)
        with self._lock:
            return self._vectors.search(vector, k)

    def save(self, folder: str | os.PathLike[str]) -> None:
        about: dict[str, object] = {"embedder": self._embedder.identity, "embedder_name": self._embedder.name}
        with self._lock, saving(folder, self.name, about) as files:
            about["vectors"] = self._vectors.save(files)

    @classmethod
    def load(cls, folder: str | os.PathLike[str], embedder: Embeds, mmap: bool = False) -> DenseIndex:
        """Opens a saved index.

        Args:
            embedder: the one it was made with.
            mmap: leave the vectors in their file, shared by all processes that map it, and read them as they are
                needed. They are then not compared with their digest, only the file's size is; and the file must not be
                changed in place. The first :meth:`add` copies them into memory.

        Raises:
            DamagedIndex: a file is missing or damaged.
            IndexMismatch: the folder holds another kind of index, or one made with another embedder.
        """
        files, about = open_folder(folder, cls.name, check=not mmap)
        if about["embedder"] != embedder.identity:
            raise IndexMismatch(
                f"the dense index in {folder} was made with embedder {about['embedder_name'] or 'packaged'} "
                f"[{about['embedder'][:12]}], and this is {embedder.name or 'packaged'} [{embedder.identity[:12]}]: "
                "open it with the former, or make the index anew"
            )
        index = cls(embedder, about["vectors"]["kind"], probes=about["vectors"]["probes"])
        index._vectors = Vectors.load(files, about["vectors"], mmap)
        return index

    def _checked(self, vectors: NDArray[np.float32], axes: int) -> NDArray[np.float32]:
        """``vectors`` at length 1; those of length 0 stay."""
        if vectors.ndim != axes or vectors.shape[-1] != self._vectors.dimension:
            wanted = [*["texts"][: axes - 1], self._vectors.dimension]
            raise SettingError(f"vectors of shape {list(vectors.shape)}: this embedder's are {wanted}")
        lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
        unit: NDArray[np.float32] = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
        return unit
