"""AgentKVShift's probes: in every chunk the rows whose keys or values have changed most (arXiv:2607.21604)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from blend.errors import BudgetError
from blend.selectors.base import BudgetedSelector, Candidates, Wants
from blend.selectors.deviation import distance, spread

__all__ = ["ChunkDeviation", "take_turns"]


@dataclass(frozen=True)
class ChunkDeviation(BudgetedSelector):
    """Per chunk, the rows whose fresh keys are furthest from the cached ones and those whose values are, in turns.

    The paper takes ``ceil(r n)`` rows of a chunk of n by keys and as many by values, and computes the union again:
    up to twice the budget. Here the budget is that of the union, so that methods are compared at equal cost. Each
    chunk gets its share of it by length, and spends it in turns, best key first; a row that both want is taken once.

    Attributes:
        layer: the check layer, 1 or more: in layer 0 the cached K/V are exact.
        relative: the divergence of a row is its L2 distance over the fresh row's length. The paper says L2, which is
            read here as the distance itself.
    """

    name: ClassVar[str] = "chunk-deviation"
    wants: ClassVar[Wants] = "fresh_kv"
    layer: int = 1
    relative: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer < 1:
            raise BudgetError(f"layer is {self.layer}: give a check layer, 1 or more")

    def check_layers(self, layers: int) -> tuple[int, ...]:
        """Raises :class:`BudgetError` when the check layer is beyond the model."""
        if self.layer >= layers:
            raise BudgetError(f"check layer {self.layer} does not exist: the model has layers 0 to {layers - 1}")
        return (self.layer,)

    def choose(self, candidates: Candidates) -> Tensor:
        fresh, layout = candidates.fresh, candidates.layout
        assert fresh is not None, "the engine hands fresh K/V to selectors that want them"
        key_R = distance(fresh.fresh_keys, fresh.cached_keys, self.relative)
        value_R = distance(fresh.fresh_values, fresh.cached_values, self.relative)
        key_T, value_T = (spread(fresh.rows_R, drift_R, layout.rows).cpu() for drift_R in (key_R, value_R))
        spans = layout.stale_spans
        shares = _shares([stop - start for start, stop in spans], self.budget(candidates.stale.numel()))
        taken = [
            torch.nonzero(torch.logical_or(*take_turns(key_T[start:stop], value_T[start:stop], share)))[:, 0] + start
            for (start, stop), share in zip(spans, shares, strict=True)
        ]
        return torch.cat(taken) if taken else candidates.stale[:0]


def take_turns(key_n: Tensor, value_n: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The rows that keys and values take when ``count`` rows are picked in turns, the largest key first.

    A row that is next for one of them and taken by the other already counts for both and costs nothing. So keys have
    their largest ones and values have theirs, equally many or keys one more; together they are ``count`` rows.

    Args:
        key_n: divergence of each row's keys; of equal ones the earlier counts as larger.
        value_n: of its values.
        count: at most n.

    Returns:
        Two masks, bool ``[n]``.
    """
    key_turn_n, value_turn_n = 2 * _rank(key_n), 2 * _rank(value_n) + 1
    turn_n = torch.minimum(key_turn_n, value_turn_n)  # no two rows have the same
    end = turn_n.sort().values[count - 1] if count else -1
    return key_turn_n <= end, value_turn_n <= end


def _rank(value_n: Tensor) -> Tensor:
    """Place of each number, 0 for the largest."""
    order = value_n.argsort(descending=True, stable=True)
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))


def _shares(sizes: Sequence[int], budget: int) -> list[int]:
    """``budget`` in proportion to ``sizes``; what rounding down leaves goes to the largest fractions."""
    exact = [budget * size / max(sum(sizes), 1) for size in sizes]
    shares = [int(part) for part in exact]
    by_fraction = sorted(range(len(sizes)), key=lambda i: (shares[i] - exact[i], i))
    for i in by_fraction[: budget - sum(shares)]:
        shares[i] += 1
    return shares
