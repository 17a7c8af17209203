"""Reranking: a model that reads question and passage together gives the better order. Knows no indexes."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

from retrieval.document import Hit
from retrieval.errors import EmbedderMissing, SettingError

__all__ = ["Reranker"]


class Reranker:
    """A cross-encoder of sentence-transformers, such as ``cross-encoder/ms-marco-MiniLM-L6-v2``.

    It reads every pair anew, so it is for the few dozen passages that an index found. None comes with kvblend: the
    model is fetched from the hub when it is first used, or lies in a folder. Several threads may use it; they take
    turns.

    Args:
        model: folder or hub id.
        device: where it runs.

    Raises:
        EmbedderMissing: there is no such model.
        SettingError: the model gives more than one number for a pair.
    """

    def __init__(self, model: str | os.PathLike[str], device: str = "cpu") -> None:
        # Importing it takes seconds, so only who reranks waits for it.
        from sentence_transformers import CrossEncoder

        try:
            self._model: Any = CrossEncoder(str(model), device=device)
        except (OSError, ValueError) as error:
            raise EmbedderMissing(
                f"no reranking model can be loaded from {str(model)!r}: give a folder or hub id of a "
                "sentence-transformers CrossEncoder, such as cross-encoder/ms-marco-MiniLM-L6-v2; none comes with "
                f"kvblend ({error})"
            ) from error
        if self._model.num_labels != 1:
            raise SettingError(
                f"{str(model)!r} gives {self._model.num_labels} numbers for a pair, so it is a classifier: take a "
                "CrossEncoder with one, which says how well the passage answers"
            )
        self._lock = threading.Lock()  # a fast tokenizer cannot serve two threads that pad to other lengths

    def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        """How well each text answers the query, in the model's own scale; what is beyond its window is cut off."""
        if not texts:
            return []
        with self._lock:
            found = self._model.predict([(query, text) for text in texts], show_progress_bar=False)
        return [float(score) for score in found]

    def rerank(self, query: str, hits: Sequence[Hit]) -> list[Hit]:
        """The same passages with the model's scores, best first; of equal scores the earlier hit first."""
        scores = self.scores(query, [hit.passage.text for hit in hits])
        again = [Hit(hit.passage, score) for hit, score in zip(hits, scores, strict=True)]
        return sorted(again, key=lambda hit: -hit.score)
