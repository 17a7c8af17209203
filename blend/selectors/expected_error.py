"""kvblend's own: rows whose KV is likely to be off, and that the question looks at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from blend.selectors.base import Candidates, top_rows
from blend.selectors.query_attention import QueryAttention

__all__ = ["ExpectedError", "expected_error"]


@dataclass(frozen=True)
class ExpectedError(QueryAttention):
    """The question's attention to a row times the variance of the row's KV from context to context.

    That is the row's part in the squared error of what the question reads, as it can be expected before anything is
    computed again: :class:`~blend.WeightedDeviation` measures the error at a check layer, and here it is known since
    the chunk was encoded. (With the standard deviation in its place, divergence was 2 to 20 % larger on SmolLM2.) It
    costs a probe pass, like :class:`~blend.QueryAttention`, which it is where chunks were encoded alone and no spread
    is known.
    """

    name: ClassVar[str] = "expected-error"

    def choose(self, candidates: Candidates) -> Tensor:
        return top_rows(candidates.stale, expected_error(candidates), self.budget(candidates.stale.numel()))


def expected_error(candidates: Candidates) -> Tensor:
    """Of each row, fp32 ``[rows]``, in no unit; the attention alone where no spread is known."""
    attention_T, spread_T = candidates.attention_T, candidates.layout.spread
    assert attention_T is not None, "the engine hands the question's attention to selectors that want it"
    return attention_T if spread_T is None else attention_T * spread_T.to(attention_T.device).square()
