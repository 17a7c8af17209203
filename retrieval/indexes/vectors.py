"""Unit vectors by number, over FAISS: exact, in inverted lists, or in a graph. Knows no texts and no embedder.

FAISS counts its rows; a table beside it says which number each row has, in 64 bits. FAISS cannot take vectors out of a
graph, and taking them out of the others moves all that stand behind, so in every kind a removed row stays, marked, and
is passed over by a selector while searching. When more than a third of the rows are dead, the living ones move into a
new index.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import faiss
import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DamagedIndex, SettingError
from retrieval.indexes.base import Match, best_first

__all__ = ["APPROXIMATE_FROM", "VectorKind", "Vectors"]

VectorKind = Literal["flat", "ivf", "hnsw"]

APPROXIMATE_FROM = 1024
"""Rows below which every kind is searched exactly: it takes well under a millisecond, and there is little to train."""

GROWTH = 4
"""Inverted lists are trained again at this many times the rows they were trained on."""

DEAD_SHARE = 1 / 3
"""Share of dead rows above which the living ones are moved into a new index."""

LINKS = 32
"""Neighbours of a row in the graph."""

BREADTH = 128
"""Candidates kept while the graph is searched, at least."""

FAISS: Any = faiss  # its type stubs lack what its Python layer adds

Floats = NDArray[np.float32]


class Vectors:
    """Vectors of length 1, found by inner product, which is then the cosine.

    Args:
        dimension: length of a vector.
        kind: ``flat`` compares with all; ``ivf`` with the nearest of about sqrt(rows) lists (k-means), trained at
            ``APPROXIMATE_FROM`` rows and at every ``GROWTH`` times as many; ``hnsw`` walks a graph (Malkov and
            Yashunin, 2018).
        probes: lists that ``ivf`` looks into, at least.

    Raises:
        SettingError: no such kind, or no probes.
    """

    def __init__(self, dimension: int, kind: VectorKind = "flat", *, probes: int = 16) -> None:
        if kind not in get_args(VectorKind):
            raise SettingError(f"dense index kind {kind!r} is not known: take {', '.join(get_args(VectorKind))}")
        if probes < 1:
            raise SettingError(f"probes is {probes}: look into at least 1 list")
        self.dimension = dimension
        self.kind: VectorKind = kind
        self.probes = probes
        self._faiss: Any = FAISS.IndexFlatIP(dimension)
        self._numbers = np.empty(0, dtype=np.int64)  # of every row; -1 for a dead one
        self._row_of: dict[int, int] = {}
        self._trained = 0  # living rows when it was made approximate; 0 while it is exact
        self._mapped = False

    def __len__(self) -> int:
        return len(self._row_of)

    def numbers(self) -> Collection[int]:
        """Numbers of all vectors, in the order they came."""
        return self._row_of.keys()

    @property
    def rows(self) -> int:
        """Rows of the FAISS index, dead ones included."""
        return len(self._numbers)

    def add(self, vectors: Floats, numbers: Sequence[int]) -> None:
        """Adds vectors ``[len(numbers), dimension]``; one whose number is there takes the other's place."""
        if not len(numbers):
            return
        self._own()
        self._kill(numbers)
        self._faiss.add(np.ascontiguousarray(vectors, dtype=np.float32))
        self._row_of.update(zip(numbers, range(self.rows, self.rows + len(numbers)), strict=True))
        self._numbers = np.concatenate([self._numbers, np.asarray(numbers, dtype=np.int64)])
        self._settle()

    def remove(self, numbers: Collection[int]) -> int:
        """Takes vectors out; returns how many were there."""
        killed = self._kill(numbers)
        self._settle()
        return killed

    def search(self, vector: Floats, k: int) -> list[Match]:
        """The ``k`` nearest, best first; an approximate kind may miss some."""
        k = min(k, len(self))
        if not k:
            return []
        with _one_thread():
            scores, rows = self._faiss.search(vector.reshape(1, -1), k, params=self._parameters(k))
        # FAISS fills up with -1 where it found nothing.
        found = [(row, score) for row, score in zip(rows[0], scores[0], strict=True) if row >= 0]
        return best_first([Match(int(self._numbers[row]), float(score)) for row, score in found])

    def save(self, folder: Path) -> dict[str, Any]:
        """Writes its files; returns what :meth:`load` has to be told."""
        FAISS.write_index(self._faiss, str(folder / "rows.faiss"))
        np.save(folder / "numbers.npy", self._numbers)
        return {"dimension": self.dimension, "kind": self.kind, "probes": self.probes, "trained": self._trained}

    @classmethod
    def load(cls, folder: Path, about: dict[str, Any], mmap: bool) -> Vectors:
        """Reads what :meth:`save` wrote; with ``mmap`` the vectors stay in the file until they are needed.

        A mapped index is copied into memory when vectors are added to it, never written to.

        Raises:
            DamagedIndex: the files do not belong together.
        """
        vectors = cls(about["dimension"], about["kind"], probes=about["probes"])
        flags = FAISS.IO_FLAG_MMAP_IFC if mmap else 0
        try:
            vectors._faiss = FAISS.read_index(str(folder / "rows.faiss"), flags)
            vectors._numbers = np.load(folder / "numbers.npy")
        except (OSError, ValueError, RuntimeError) as error:
            raise DamagedIndex(f"the vectors in {folder} cannot be read ({error}): make the index anew") from error
        vectors._mapped = mmap
        vectors._trained = about["trained"]
        vectors._row_of = {int(number): row for row, number in enumerate(vectors._numbers) if number >= 0}
        return vectors

    # --- helpers ----------------------------------------------------------------------------------

    def _own(self) -> None:
        # FAISS ends the process when it is made to change, or even clone, what it has mapped.
        if self._mapped:
            self._faiss = FAISS.deserialize_index(FAISS.serialize_index(self._faiss))
            self._mapped = False

    def _kill(self, numbers: Collection[int]) -> int:
        rows = [self._row_of.pop(number) for number in numbers if number in self._row_of]
        self._numbers[rows] = -1
        return len(rows)

    def _settle(self) -> None:
        """Moves the living rows into a new index where that is due."""
        dead = self.rows - len(self)
        grown = self.kind != "flat" and not self._trained and len(self) >= APPROXIMATE_FROM
        outgrown = self.kind == "ivf" and self._trained and len(self) >= GROWTH * self._trained
        if grown or outgrown or dead > DEAD_SHARE * self.rows:
            self._rebuild()

    def _rebuild(self) -> None:
        living = self._numbers >= 0
        vectors: Floats = _storage(self._faiss).reconstruct_n(0, self.rows)[living]
        self._numbers = self._numbers[living]
        self._row_of = {int(number): row for row, number in enumerate(self._numbers)}
        self._trained = len(self) if self.kind != "flat" and len(self) >= APPROXIMATE_FROM else 0
        self._faiss = _empty(self.kind if self._trained else "flat", vectors, self.dimension)
        self._faiss.add(vectors)
        self._mapped = False

    def _parameters(self, k: int) -> Any:
        living: dict[str, Any] = {}
        if len(self) < self.rows:
            living["sel"] = FAISS.IDSelectorBitmap(np.packbits(self._numbers >= 0, bitorder="little"))
        if isinstance(self._faiss, FAISS.IndexIVF):
            # As many lists as hold four times what is asked for, if that is more.
            lists = self._faiss.nlist
            return FAISS.SearchParametersIVF(
                nprobe=min(lists, max(self.probes, math.ceil(4 * k * lists / len(self)))), **living
            )
        if isinstance(self._faiss, FAISS.IndexHNSW):
            return FAISS.SearchParametersHNSW(efSearch=max(BREADTH, 2 * k), **living)
        return FAISS.SearchParameters(**living)


def _empty(kind: VectorKind, vectors: Floats, dimension: int) -> Any:
    """A new FAISS index, trained on ``vectors`` where its kind asks for it."""
    if kind == "hnsw":
        return FAISS.IndexHNSWFlat(dimension, LINKS, FAISS.METRIC_INNER_PRODUCT)
    if kind == "ivf":
        lists = round(math.sqrt(len(vectors)))
        index = FAISS.IndexIVFFlat(FAISS.IndexFlatIP(dimension), dimension, lists, FAISS.METRIC_INNER_PRODUCT)
        index.cp.spherical = True
        index.cp.min_points_per_centroid = 1  # sqrt(rows) a list are enough; FAISS would print a warning
        index.train(vectors)
        return index
    return FAISS.IndexFlatIP(dimension)


def _storage(index: Any) -> Any:
    """What holds the vectors of an index: of a graph the flat index below it."""
    return FAISS.downcast_index(index.storage) if isinstance(index, FAISS.IndexHNSW) else index


@contextmanager
def _one_thread() -> Iterator[None]:
    """Holds FAISS to this thread: one query takes two of them twice as long (20,000 rows, two cores)."""
    before = FAISS.omp_get_max_threads()
    FAISS.omp_set_num_threads(1)
    try:
        yield
    finally:
        FAISS.omp_set_num_threads(before)
