"""What a selector is told and what it answers. Knows nothing of stores or models.

Shape suffixes: ``T`` rows of the prompt, ``R`` rows that run, ``H`` kv heads, ``D`` head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from blend.errors import BudgetError
from blend.layout import Layout

__all__ = ["Candidates", "FreshKV", "Outlook", "Selector", "Wants", "budget_rows", "top_rows"]

Wants = Literal["nothing", "question_attention", "fresh_kv", "both"]
"""The evidence that a selector asks for; see :class:`Selector`."""


class FreshKV(NamedTuple):
    """Fresh and cached K/V of the rows that run, at a check layer. All ``[H, R, D]``."""

    layer: int
    rows_R: Tensor
    fresh_keys: Tensor
    fresh_values: Tensor
    cached_keys: Tensor
    cached_values: Tensor


class Candidates(NamedTuple):
    """The rows that may be chosen and the evidence about them.

    Attributes:
        stale: rows to choose from, int64, sorted.
        layout: the prompt's pieces.
        attention_T: the question's attention over all rows, fp32 (only for selectors that want it).
        fresh: fresh against cached K/V at a check layer (only for selectors that check).
        elapsed: seconds since the request began.
    """

    stale: Tensor
    layout: Layout
    attention_T: Tensor | None = None
    fresh: FreshKV | None = None
    elapsed: float = 0.0


class Outlook(NamedTuple):
    """What is known of a request before anything of it is computed.

    Attributes:
        rows: of the prompt.
        prefix: rows of it that an exact prefix covers.
        fresh: rows that are computed whatever is chosen: the question, and what nothing is known of.
        missing: rows of chunks that have to be encoded before they can be reused.
    """

    rows: int
    prefix: int
    fresh: int
    missing: int


class Selector(ABC):
    """Chooses the reused rows that are computed again. Strategies are small frozen dataclasses.

    Class attributes say when :meth:`choose` is called:

    * ``wants = "nothing"``: once, before layer 0;
    * ``wants = "question_attention"``: once, before layer 0, after the question alone has run over the stale cache;
    * ``wants = "fresh_kv"``: at each of :meth:`check_layers`, where fresh K/V of the running rows are known. All rows
      run up to the first of them, and the set can only shrink;
    * ``wants = "both"``: as with ``fresh_kv``, after the question alone has run as well.
    """

    wants: ClassVar[Wants] = "nothing"
    name: ClassVar[str]
    adapts: ClassVar[bool] = False
    """Whether it weighs what a request costs, so that a plain prefill is among its choices even where it is named."""

    @property
    def wants_attention(self) -> bool:
        """Whether the question's attention is to be found first."""
        return self.wants in ("question_attention", "both")

    @property
    def wants_fresh(self) -> bool:
        """Whether it chooses at check layers."""
        return self.wants in ("fresh_kv", "both")

    @abstractmethod
    def choose(self, candidates: Candidates) -> Tensor:
        """Rows to compute again: int64, sorted, unique, a subset of ``candidates.stale``."""

    def explain(self, candidates: Candidates) -> str | None:
        """For the report: why :meth:`choose` takes as many of these as it does; None where a budget says it all."""
        return None

    def rather_prefill(self, outlook: Outlook) -> str | None:
        """Why a request is better prefilled in full than fused; None where it is not."""
        return None

    def check_layers(self, layers: int) -> tuple[int, ...]:
        """Layers (ascending) at which fresh K/V are wanted, for a model of ``layers`` layers."""
        return ()

    def probe_layers(self, layers: int) -> tuple[int, ...]:
        """Layers (ascending) whose question attention is wanted, for a model of ``layers`` layers."""
        return ()


@dataclass(frozen=True)
class BudgetedSelector(Selector):
    """A selector with a budget of rows.

    Attributes:
        ratio: share of the stale rows, in [0, 1].
        rows: number of rows; takes the place of ``ratio`` when given.

    Raises:
        BudgetError: out of range.
    """

    ratio: float = 0.15
    rows: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.ratio <= 1.0:
            raise BudgetError(f"ratio is {self.ratio}: it must lie in [0, 1], the share of reused rows computed again")
        if self.rows is not None and (self.rows < 0 or int(self.rows) != self.rows):
            raise BudgetError(f"rows is {self.rows}: it must be a whole number, 0 or more")

    def budget(self, stale: int) -> int:
        """Rows that may be chosen of ``stale`` ones."""
        return budget_rows(stale, self.ratio, self.rows)


def budget_rows(stale: int, ratio: float, rows: int | None = None) -> int:
    """The budget in rows: ``rows`` if given, else ``ratio * stale`` rounded, never more than ``stale``."""
    return min(stale, rows if rows is not None else round(ratio * stale))


def top_rows(stale: Tensor, score_T: Tensor, count: int) -> Tensor:
    """The ``count`` rows of ``stale`` with the highest score; ties go to the earlier row, so the choice is stable."""
    order = torch.argsort(score_T[stale.to(score_T.device)], descending=True, stable=True)[:count]
    return stale[order.to(stale.device)].sort().values
