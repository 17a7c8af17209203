"""Which passages belong to a question: the indexes that a pipeline is set to, kept in step with its catalogue.

Indexes are made from the catalogue. Whatever has changed there, by this process or another, or before an interruption,
is caught up with at the next search: numbers that are new go in, numbers that are gone go out.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from retrieval.embed import Embeds
from retrieval.errors import DamagedIndex, IndexMismatch
from retrieval.indexes import DenseIndex, HybridIndex, Index, Match, SparseIndex
from retrieval.rag.catalogue import Catalogue
from retrieval.rag.settings import RagSettings

__all__ = ["Finder"]


class Finder:
    """Searches the passages of a catalogue.

    Args:
        catalogue: what there is to find.
        settings: which indexes, and how passages are written.
        embedder: for the dense index; None without one.
        folder: where the indexes were saved, if they were; a damaged or foreign one is made anew.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        settings: RagSettings,
        embedder: Embeds | None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self._catalogue, self._settings = catalogue, settings
        self._lock = threading.RLock()
        self._folder = None if folder is None else Path(folder)
        self._seen: object = None
        dense = _dense(settings, embedder, folder) if embedder is not None else None
        sparse = _sparse(folder) if settings.retriever != "dense" else None
        self._indexes: list[Index] = [index for index in (dense, sparse) if index is not None]
        self._unsaved = not all(len(index) for index in self._indexes)  # those that were loaded hold something
        self.catch_up()  # a hybrid index is of such as hold the same
        self._index = HybridIndex(self._indexes) if len(self._indexes) > 1 else self._indexes[0]

    def search(self, question: str, k: int) -> list[Match]:
        """The ``k`` best passages, best first."""
        self.catch_up()
        return self._index.search(question, k)

    def catch_up(self) -> None:
        """Brings the indexes into step with the catalogue; returns at once where they are."""
        with self._lock:
            version = self._catalogue.version
            if version == self._seen:
                return
            wanted = self._catalogue.numbers()
            for index in self._indexes:
                have = set(index.numbers())
                if have != wanted:
                    index.remove(have - wanted)
                    self._add(index, sorted(wanted - have))
                    self._unsaved = True
            self._seen = version

    def save(self, folder: str | os.PathLike[str] | None = None) -> None:
        """Writes the indexes, in step with the catalogue, into a folder; by default their own, if they have one.

        There nothing is written where nothing has changed since.
        """
        target = self._folder if folder is None else Path(folder)
        if target is None:
            return
        with self._lock:
            self.catch_up()
            if folder is None and not self._unsaved:
                return
            for index in self._indexes:
                index.save(target / index.name)
            self._unsaved = self._unsaved and folder is not None

    def _add(self, index: Index, numbers: Sequence[int]) -> None:
        if not numbers:
            return
        if isinstance(index, DenseIndex):
            vectors = self._catalogue.vectors(numbers)
            index.add_vectors(np.stack([vectors[number] for number in numbers]), numbers)
        else:
            written = self._settings.written
            index.add([written(p.text, p.title, p.source) for p in self._catalogue.passages(numbers)], numbers)


def _dense(settings: RagSettings, embedder: Embeds, folder: str | os.PathLike[str] | None) -> DenseIndex:
    saved = None if folder is None else Path(folder) / DenseIndex.name
    if saved is not None and saved.is_dir():
        try:
            return DenseIndex.load(saved, embedder)
        except (DamagedIndex, IndexMismatch):
            shutil.rmtree(saved)
    return DenseIndex(embedder, kind=settings.dense)


def _sparse(folder: str | os.PathLike[str] | None) -> SparseIndex:
    saved = None if folder is None else Path(folder) / SparseIndex.name
    if saved is not None and saved.is_dir():
        try:
            return SparseIndex.load(saved)
        except (DamagedIndex, IndexMismatch):
            shutil.rmtree(saved)
    return SparseIndex()
