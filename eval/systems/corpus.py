"""All passages of a run, and which are alike. Knows no models but the embedder, and not what likeness is used for.

Shape suffixes: ``N`` passages, ``E`` length of a vector.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from blend import Chunk, KVBlendError
from blend.progress import track
from eval.systems.base import Corpus
from retrieval.embed import Embeds

__all__ = ["EmbeddedCorpus", "UnknownPassage"]

_BATCH = 256  # texts between two steps of the bar


class UnknownPassage(KVBlendError, ValueError):
    """A chunk that is none of the corpus's passages, so that nothing is known of what is like it."""


class EmbeddedCorpus(Corpus):
    """Passages by the likeness of their texts: the cosine of their embeddings.

    The vectors are computed once, when they are first asked for.

    Args:
        passages: each as its chunk and its text; of passages with the same tokens the first counts.
        embedder: such as :class:`retrieval.Embedder`.
        progress: show a bar while many are embedded.
    """

    def __init__(self, passages: Iterable[tuple[Chunk, str]], embedder: Embeds, *, progress: bool = True) -> None:
        texts: dict[Chunk, str] = {}
        for chunk, text in passages:
            texts.setdefault(chunk, text)
        self._texts = tuple(texts.values())
        self._chunks = tuple(texts)
        self._places = {chunk: place for place, chunk in enumerate(self._chunks)}
        self._embedder, self._progress = embedder, progress

    def __len__(self) -> int:
        return len(self._chunks)

    def neighbours(self, chunk: Chunk, count: int) -> list[Chunk]:
        """The ``count`` chunks that are most like ``chunk``, nearest first, itself left out.

        All others where the corpus has no more; of equally like ones the earlier comes first.

        Raises:
            UnknownPassage: ``chunk`` is not in the corpus.
        """
        place = self._places.get(chunk)
        if place is None:
            raise UnknownPassage(
                f"the chunk {chunk.name!r} of {len(chunk)} tokens is none of the corpus's {len(self)} passages: build "
                "the corpus from all passages of the run, split and tokenised as in the prompts"
            )
        vectors_NE = self._vectors
        likeness_N = vectors_NE @ vectors_NE[place]
        nearest = np.argsort(-likeness_N, kind="stable")
        return [self._chunks[other] for other in nearest[: count + 1].tolist() if other != place][:count]

    @cached_property
    def _vectors(self) -> NDArray[np.float32]:
        """``[N, E]``, of length 1, whatever the embedder's are."""
        shown = self._progress and len(self._texts) > _BATCH
        parts = list(track(self._embedded(), total=-(-len(self._texts) // _BATCH), label="embedding", show=shown))
        vectors_NE = np.concatenate(parts)
        lengths_N1 = np.linalg.norm(vectors_NE, axis=1, keepdims=True)
        return np.asarray(vectors_NE / np.maximum(lengths_N1, np.finfo(np.float32).tiny), dtype=np.float32)

    def _embedded(self) -> Iterator[NDArray[np.float32]]:
        for start in range(0, len(self._texts), _BATCH):
            yield self._embedder.encode(self._texts[start : start + _BATCH])
