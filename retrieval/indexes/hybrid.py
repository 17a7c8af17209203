"""Hybrid retrieval: the lists of several indexes put together by rank."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import ClassVar

from retrieval.embed import Embeds
from retrieval.errors import IndexMismatch, SettingError
from retrieval.indexes.base import Index, Match, at_least_one, best_first, numbers_for
from retrieval.indexes.dense import DenseIndex
from retrieval.indexes.folder import open_folder, saving
from retrieval.indexes.sparse import SparseIndex

__all__ = ["HybridIndex", "fuse_ranks"]

DEPTH = 50
"""Places of each list that count, at least; four times the texts asked for, if that is more."""


class HybridIndex(Index):
    """Texts by reciprocal rank fusion of several indexes, usually a dense and a sparse one.

    It keeps nothing itself: who changes one of the indexes directly has to change the others too.

    Args:
        indexes: over the same texts, by the same numbers.
        constant: how little the first places stand out.

    Raises:
        SettingError: no index, indexes over different numbers, or a negative constant.
    """

    name: ClassVar[str] = "hybrid"

    def __init__(self, indexes: Sequence[Index], constant: float = 60) -> None:
        if not indexes:
            raise SettingError(
                "a hybrid index needs at least one index, such as [DenseIndex(Embedder()), SparseIndex()]"
            )
        if constant < 0:
            raise SettingError(f"constant is {constant}: 0 or more; the paper takes 60")
        if len({frozenset(index.numbers()) for index in indexes}) > 1:
            sizes = ", ".join(f"{index.name} {len(index)}" for index in indexes)
            raise SettingError(
                f"the indexes hold different texts ({sizes}): add the same texts to all by the same numbers"
            )
        self.indexes = tuple(indexes)
        self.constant = constant

    def __len__(self) -> int:
        return len(self.indexes[0])

    def numbers(self) -> Collection[int]:
        return self.indexes[0].numbers()

    def add(self, texts: Sequence[str], numbers: Sequence[int] | None = None) -> None:
        numbers = numbers_for(len(texts), numbers, self.numbers() if numbers is None else ())
        for index in self.indexes:
            index.add(texts, numbers)

    def remove(self, numbers: Collection[int]) -> int:
        return max(index.remove(numbers) for index in self.indexes)

    def search(self, query: str, k: int) -> list[Match]:
        at_least_one(k)
        depth = max(4 * k, DEPTH)
        return fuse_ranks([index.search(query, depth) for index in self.indexes], self.constant)[:k]

    def save(self, folder: str | os.PathLike[str]) -> None:
        about = {"constant": self.constant, "indexes": [index.name for index in self.indexes]}
        with saving(folder, self.name, about) as files:
            for place, index in enumerate(self.indexes):
                index.save(files / str(place))

    @classmethod
    def load(cls, folder: str | os.PathLike[str], embedder: Embeds, mmap: bool = False) -> HybridIndex:
        """Opens a saved index of dense and sparse ones; see :meth:`DenseIndex.load` for the arguments.

        Raises:
            DamagedIndex: a file is missing or damaged.
            IndexMismatch: the folder holds another kind of index, or one made with another embedder.
        """
        files, about = open_folder(folder, cls.name, check=not mmap)
        indexes: list[Index] = []
        for place, name in enumerate(about["indexes"]):
            if name == DenseIndex.name:
                indexes.append(DenseIndex.load(files / str(place), embedder, mmap))
            elif name == SparseIndex.name:
                indexes.append(SparseIndex.load(files / str(place), mmap))
            else:
                raise IndexMismatch(f"{folder} holds a {name} index: open that with its own class, and fuse it here")
        return cls(indexes, about["constant"])


def fuse_ranks(lists: Sequence[Sequence[Match]], constant: float = 60) -> list[Match]:
    """Reciprocal rank fusion (Cormack, Clarke and Buettcher, SIGIR 2009): a text scores 1 / (constant + rank) per list.

    Args:
        lists: each best first; ranks count from 1.

    Returns:
        Every text of any list, best first; of equal scores the lower number first.
    """
    scores: dict[int, float] = {}
    for matches in lists:
        for rank, match in enumerate(matches, start=1):
            scores[match.number] = scores.get(match.number, 0.0) + 1 / (constant + rank)
    return best_first([Match(number, score) for number, score in scores.items()])
