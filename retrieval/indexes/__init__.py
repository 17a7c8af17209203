"""Indexes of passages: by meaning, by words, and by both."""

from retrieval.indexes.base import Index, Match
from retrieval.indexes.dense import DenseIndex
from retrieval.indexes.hybrid import HybridIndex
from retrieval.indexes.sparse import SparseIndex

__all__ = ["DenseIndex", "HybridIndex", "Index", "Match", "SparseIndex"]
