"""retrieval: from documents to the passages of a prompt, and to an answer."""

from retrieval.document import Document, Hit, Passage, Piece
from retrieval.embed import Embedder, Embeds
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
from retrieval.indexes import DenseIndex, HybridIndex, Index, Match, SparseIndex
from retrieval.loaders import Skipped, from_rows, load_folder
from retrieval.order import ORDERS
from retrieval.rag import AsyncRagStream, Changes, Chat, RagAnswer, RagPipeline, RagSettings, RagStream, Stats
from retrieval.rerank import Reranker
from retrieval.splitting import Splitter

__all__ = [
    "ORDERS",
    "AsyncRagStream",
    "Changes",
    "Chat",
    "DamagedIndex",
    "DenseIndex",
    "Document",
    "DocumentExists",
    "Embedder",
    "EmbedderMissing",
    "Embeds",
    "ExtraMissing",
    "Hit",
    "HybridIndex",
    "Index",
    "IndexMismatch",
    "Match",
    "Passage",
    "Piece",
    "RagAnswer",
    "RagPipeline",
    "RagSettings",
    "RagStream",
    "Reranker",
    "SettingError",
    "Skipped",
    "SparseIndex",
    "Splitter",
    "Stats",
    "UnknownDocument",
    "UnreadableDocument",
    "from_rows",
    "load_folder",
]
