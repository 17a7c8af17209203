"""Indexes of passages: by meaning, by words, and by both."""

from retrieval.indexes.base import Index, Match
from retrieval.indexes.dense import DenseIndex

__all__ = ["DenseIndex", "Index", "Match"]
