"""KVShare: rows that have changed and that the question looks at (Yang et al. 2025, arXiv:2503.16525)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from blend.errors import BudgetError
from blend.selectors.base import BudgetedSelector, Candidates, Wants, top_rows
from blend.selectors.deviation import On, check_on, deviation, spread
from blend.selectors.query_attention import QueryAttention

__all__ = ["WeightedDeviation"]


@dataclass(frozen=True)
class WeightedDeviation(BudgetedSelector):
    """The question's attention to a row times how far its fresh K/V at a check layer are from the cached ones.

    To first order that is the row's part in the error of what the question reads. It costs a probe pass and a check,
    and both are charged. The paper's algorithm also repairs rows while decoding, which this does not.

    Attributes:
        on: which deviation counts, by its L2 norm.
        layer: the check layer, 1 or more: in layer 0 the cached K/V are exact.
        layers: layers whose attention counts; None for all.
    """

    name: ClassVar[str] = "weighted-deviation"
    wants: ClassVar[Wants] = "both"
    on: On = "both"
    layer: int = 1
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_on(self.on)
        if self.layer < 1:
            raise BudgetError(f"layer is {self.layer}: give a check layer, 1 or more")
        QueryAttention(layers=self.layers)  # raises when they make no sense

    def check_layers(self, layers: int) -> tuple[int, ...]:
        """Raises :class:`BudgetError` when the check layer is beyond the model."""
        if self.layer >= layers:
            raise BudgetError(f"check layer {self.layer} does not exist: the model has layers 0 to {layers - 1}")
        return (self.layer,)

    def probe_layers(self, layers: int) -> tuple[int, ...]:
        """Raises :class:`BudgetError` when a configured layer is beyond the model."""
        return QueryAttention(layers=self.layers).probe_layers(layers)

    def choose(self, candidates: Candidates) -> Tensor:
        fresh, attention_T = candidates.fresh, candidates.attention_T
        assert fresh is not None, "the engine hands fresh K/V to selectors that want them"
        assert attention_T is not None, "the engine hands the question's attention to selectors that want it"
        moved_T = spread(fresh.rows_R, deviation(fresh, self.on).sqrt(), candidates.layout.rows)
        score_T = attention_T.to(moved_T.device) * moved_T
        return top_rows(candidates.stale, score_T, self.budget(candidates.stale.numel()))
