"""Sparse retrieval: the texts that share the rarest words with the query (BM25), over bm25s."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import bm25s
import numpy as np
from bm25s.tokenization import Tokenizer
from numpy.typing import NDArray

from retrieval.errors import DamagedIndex
from retrieval.indexes.base import Index, Match, at_least_one, best_first, numbers_for
from retrieval.indexes.folder import open_folder, saving
from retrieval.indexes.words import words

__all__ = ["SparseIndex"]

Ints = NDArray[np.int32]


class _Scorer(NamedTuple):
    """A finished BM25 index, and the number of each of its texts; never changed, only replaced."""

    bm25: Any
    numbers: NDArray[np.int64]


class SparseIndex(Index):
    """Texts by BM25 in Lucene's form (Kamphuis et al., ECIR 2020), with k1 1.5 and b 0.75.

    There are no stop words and no stemming: both belong to one language, and passages may be in any; words that stand
    in most texts weigh next to nothing by themselves. A text that shares no word with the query is no match.

    The scores of all texts are computed ahead, and depend on each other, so a change costs the next search a rebuild:
    about 0.1 s for each 1,000 passages of 60 words (one core). Add and remove many at a time.
    """

    name: ClassVar[str] = "sparse"

    def __init__(self) -> None:
        self._tokenizer = Tokenizer(lower=False, splitter=words, stopwords=None)
        self._texts: dict[int, Ints] = {}  # word ids of each text
        self._scorer: _Scorer | None = None  # None after a change
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._texts)

    def numbers(self) -> Collection[int]:
        with self._lock:
            return frozenset(self._texts)

    def add(self, texts: Sequence[str], numbers: Sequence[int] | None = None) -> None:
        with self._lock:
            numbers = numbers_for(len(texts), numbers, self._texts)
            if numbers:
                self._scorer = None
                self._texts.update(zip(numbers, self._ids(texts, learn=True), strict=True))

    def remove(self, numbers: Collection[int]) -> int:
        with self._lock:
            there = self._texts.keys() & set(numbers)
            if there:
                self._scorer = None
            for number in there:
                del self._texts[number]
            return len(there)

    def search(self, query: str, k: int) -> list[Match]:
        at_least_one(k)
        with self._lock:
            scorer = self._up_to_date()
            (asked,) = self._ids([query], learn=False)
        if scorer is None or not len(asked):
            return []
        scores = scorer.bm25.get_scores_from_ids(asked)
        found = np.flatnonzero(scores > 0)
        if len(found) > k:  # all that tie with the last place stay in, for the order among them
            found = found[scores[found] >= np.partition(scores[found], -k)[-k]]
        matches = [Match(int(scorer.numbers[i]), float(scores[i])) for i in found]
        return best_first(matches)[:k]

    def save(self, folder: str | os.PathLike[str]) -> None:
        with self._lock, saving(folder, self.name, {}) as files:
            texts = [np.empty(0, dtype=np.int32), *self._texts.values()]
            np.save(files / "numbers.npy", np.fromiter(self._texts, dtype=np.int64))
            np.save(files / "starts.npy", np.cumsum([len(ids) for ids in texts]))
            np.save(files / "words.npy", np.concatenate(texts))
            if scorer := self._up_to_date():
                scorer.bm25.save(files, show_progress=False)

    @classmethod
    def load(cls, folder: str | os.PathLike[str], mmap: bool = False) -> SparseIndex:
        """Opens a saved index.

        Args:
            mmap: leave scores and words in their files and read them as they are needed. They are then not compared
                with their digest, only the files' sizes are; and the files must not be changed in place.

        Raises:
            DamagedIndex: a file is missing or damaged.
            IndexMismatch: the folder holds another kind of index.
        """
        files, _ = open_folder(folder, cls.name, check=not mmap)
        index = cls()
        try:
            index._read(files, mmap)
        except (OSError, ValueError, KeyError) as error:
            raise DamagedIndex(f"the words in {files} cannot be read ({error}): make the index anew") from error
        return index

    # --- helpers ----------------------------------------------------------------------------------

    def _ids(self, texts: Sequence[str], learn: bool) -> list[Ints]:
        """Word ids of each text; words never seen are learnt or left out."""
        found = self._tokenizer.streaming_tokenize(texts, update_vocab=learn, allow_empty=False)
        return [np.asarray(ids, dtype=np.int32) for ids in found]

    def _up_to_date(self) -> _Scorer | None:
        """The scorer of the texts as they are; None if there are none, or not one word in them."""
        vocabulary = self._tokenizer.word_to_id
        if self._scorer is None and any(map(len, self._texts.values())):
            bm25 = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
            texts = [ids.tolist() for ids in self._texts.values()]
            bm25.scores = bm25.build_index_from_ids(list(vocabulary.values()), texts, show_progress=False)
            bm25.vocab_dict = vocabulary
            self._scorer = _Scorer(bm25, np.fromiter(self._texts, dtype=np.int64))
        return self._scorer

    def _read(self, files: Path, mmap: bool) -> None:
        numbers = np.load(files / "numbers.npy")
        ids = np.asarray(np.load(files / "words.npy", mmap_mode="r" if mmap else None))
        texts = [ids[start:end] for start, end in pairwise(np.load(files / "starts.npy"))]
        self._texts = dict(zip(numbers.tolist(), texts, strict=True))
        if len(ids):
            bm25 = bm25s.BM25.load(files, mmap=mmap, show_progress=False)
            self._tokenizer.word_to_id = bm25.vocab_dict
            self._scorer = _Scorer(bm25, numbers)
