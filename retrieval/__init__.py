"""retrieval: finding the passages of a prompt."""

from retrieval.dense import DenseIndex, Hit
from retrieval.embed import Embedder
from retrieval.errors import EmbedderMissing

__all__ = ["DenseIndex", "Embedder", "EmbedderMissing", "Hit"]
