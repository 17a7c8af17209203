"""ProphetKV: the rows that the question looks at (ICML 2026, arXiv:2602.02579)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from blend.errors import BudgetError
from blend.selectors.base import BudgetedSelector, Candidates, Wants, top_rows

__all__ = ["QueryAttention"]


@dataclass(frozen=True)
class QueryAttention(BudgetedSelector):
    """The question's softmax attention over the stale cache, averaged over heads, question tokens and layers.

    A probe pass runs the question alone through the model; it is part of the method's cost and is charged.

    Attributes:
        layers: layers whose attention counts; None for all (the paper). The probe stops behind the last of them.
    """

    name: ClassVar[str] = "query-attention"
    wants: ClassVar[Wants] = "question_attention"
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is not None and (not self.layers or min(self.layers) < 0):
            raise BudgetError(f"layers is {self.layers}: give layer numbers from 0, or None for all layers")

    def probe_layers(self, layers: int) -> tuple[int, ...]:
        """Raises :class:`BudgetError` when a configured layer is beyond the model."""
        if self.layers is None:
            return tuple(range(layers))
        if max(self.layers) >= layers:
            raise BudgetError(f"probe layer {max(self.layers)} does not exist: the model has layers 0 to {layers - 1}")
        return tuple(sorted(set(self.layers)))

    def choose(self, candidates: Candidates) -> Tensor:
        assert candidates.attention_T is not None, "the engine hands the question's attention to selectors that want it"
        return top_rows(candidates.stale, candidates.attention_T, self.budget(candidates.stale.numel()))
