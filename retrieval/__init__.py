"""retrieval: from documents to the passages of a prompt, and to an answer."""

from retrieval.document import Document, Hit, Passage, Piece
from retrieval.embed import Embedder
from retrieval.errors import (
    DamagedIndex,
    DocumentExists,
    EmbedderMissing,
    ExtraMissing,
    IndexMismatch,
    SettingError,
    UnknownDocument,
    UnreadableDocument,
)
from retrieval.indexes import DenseIndex, Index, Match

__all__ = [
    "DamagedIndex",
    "DenseIndex",
    "Document",
    "DocumentExists",
    "Embedder",
    "EmbedderMissing",
    "ExtraMissing",
    "Hit",
    "Index",
    "IndexMismatch",
    "Match",
    "Passage",
    "Piece",
    "SettingError",
    "UnknownDocument",
    "UnreadableDocument",
]
