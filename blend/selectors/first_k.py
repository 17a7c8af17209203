"""EPIC / LegoLink: the first tokens of every chunk (Hu et al., ICML 2025, arXiv:2410.15332)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from blend.errors import BudgetError
from blend.selectors.base import BudgetedSelector, Candidates

__all__ = ["FirstK"]


@dataclass(frozen=True)
class FirstK(BudgetedSelector):
    """The first rows of every stale chunk, chosen without looking at the model.

    A chunk's head was encoded as if nothing stood before it and became a sink of attention; computing it again turns
    it back into ordinary text. The paper takes k = 2 to 32 tokens per chunk. A first chunk that stands right behind
    its own prelude is exact and gets none.

    Attributes:
        k: rows per chunk. None spreads the budget (``ratio`` or ``rows``) evenly over the chunks, which is the
            paper's recipe at an equal budget.
    """

    name: ClassVar[str] = "first-k"
    k: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k is not None and self.k < 0:
            raise BudgetError(f"k is {self.k}: it must be 0 or more, the rows computed again at each chunk's head")

    def choose(self, candidates: Candidates) -> Tensor:
        spans = candidates.layout.stale_spans
        if self.k is not None:
            heads = [min(self.k, stop - start) for start, stop in spans]
        else:
            heads = _even_shares([stop - start for start, stop in spans], self.budget(candidates.stale.numel()))
        runs = [torch.arange(start, start + head) for (start, _), head in zip(spans, heads, strict=True)]
        return torch.cat(runs) if runs else candidates.stale[:0]


def _even_shares(sizes: list[int], budget: int) -> list[int]:
    """Spends ``budget`` one row per chunk and round; what a short chunk cannot take goes to the others."""
    shares = [0] * len(sizes)
    left = budget
    while left > 0 and (room := [i for i, size in enumerate(sizes) if shares[i] < size]):
        step = max(1, left // len(room))
        for i in room:
            take = min(step, sizes[i] - shares[i], left)
            shares[i] += take
            left -= take
    return shares
