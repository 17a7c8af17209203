"""CacheBlend: the rows whose cached KV is furthest from the fresh one (Yao et al., EuroSys 2025, arXiv:2405.16444)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from blend.errors import BudgetError
from blend.selectors.base import BudgetedSelector, Candidates, Wants, top_rows
from blend.selectors.deviation import On, check_on, deviation, spread

__all__ = ["KVDeviation"]


@dataclass(frozen=True)
class KVDeviation(BudgetedSelector):
    """Squared L2 distance between fresh and moved cached K/V at check layers; the largest are computed again.

    All rows run through the layers before the first check layer, and that layer's K/V projection. The released code
    makes one choice at layer 1 from V alone (the defaults here); the paper filters gradually, which is
    ``layers=(1, 2, ...)`` with a falling ``schedule``.

    Attributes:
        on: which deviation counts: ``"value"`` (released code), ``"key"``, or ``"both"`` (their sum, each divided by
            its mean so that neither drowns the other).
        layers: check layers, ascending. Layer 0 is no use: its cached K/V are exact.
        schedule: budget at each check layer, as a multiple of the final budget; the last must be 1.
    """

    name: ClassVar[str] = "kv-deviation"
    wants: ClassVar[Wants] = "fresh_kv"
    on: On = "value"
    layers: tuple[int, ...] = (1,)
    schedule: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_on(self.on)
        if not self.layers or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 1:
            raise BudgetError(f"layers is {self.layers}: give ascending check layers, 1 or more")
        if len(self.schedule) != len(self.layers) or self.schedule[-1] != 1.0 or min(self.schedule) < 1.0:
            raise BudgetError(
                f"schedule is {self.schedule}: give one multiple of the budget (1 or more) per check layer "
                f"({len(self.layers)}), ending in 1"
            )

    def check_layers(self, layers: int) -> tuple[int, ...]:
        """Raises :class:`BudgetError` when a configured layer is beyond the model."""
        if self.layers[-1] >= layers:
            raise BudgetError(f"check layer {self.layers[-1]} does not exist: the model has layers 0 to {layers - 1}")
        return self.layers

    def choose(self, candidates: Candidates) -> Tensor:
        fresh = candidates.fresh
        assert fresh is not None, "the engine hands fresh K/V to selectors that want them"
        budget = self.budget(candidates.layout.stale.numel())
        multiple = dict(zip(self.layers, self.schedule, strict=True))[fresh.layer]
        score_T = spread(fresh.rows_R, deviation(fresh, self.on), candidates.layout.rows)
        return top_rows(candidates.stale, score_T, min(round(budget * multiple), candidates.stale.numel()))
