"""One file per published way to choose the rows that are computed again."""

from blend.selectors.adaptive import Adaptive
from blend.selectors.base import BudgetedSelector, Candidates, FreshKV, Outlook, Selector, Wants, top_rows
from blend.selectors.chunk_deviation import ChunkDeviation
from blend.selectors.expected_error import ExpectedError
from blend.selectors.first_k import FirstK
from blend.selectors.kv_deviation import KVDeviation
from blend.selectors.query_attention import QueryAttention
from blend.selectors.static import FullRecompute, FullReuse, Random
from blend.selectors.weighted_deviation import WeightedDeviation

__all__ = [
    "Adaptive",
    "BudgetedSelector",
    "Candidates",
    "ChunkDeviation",
    "ExpectedError",
    "FirstK",
    "FreshKV",
    "FullRecompute",
    "FullReuse",
    "KVDeviation",
    "Outlook",
    "QueryAttention",
    "Random",
    "Selector",
    "Wants",
    "WeightedDeviation",
    "top_rows",
]
