"""What a corrector is told and what it answers. Knows nothing of models, nor of how rows are chosen.

Shape suffixes: ``C`` rows computed again, ``N`` stale rows that are not, ``H`` kv heads, ``D`` head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, NamedTuple

from torch import Tensor

from blend.layout import Layout
from blend.selectors import FreshKV
from rope import Rope

__all__ = ["Choice", "Correction", "Corrector", "Shift"]


class Choice(NamedTuple):
    """Which stale rows are computed again from some layer on, and which stay.

    Attributes:
        chosen_C: rows computed again, int64, sorted; not empty.
        left_N: the other stale rows, int64, sorted; not empty.
        layout: the prompt's pieces; ``layout.stale_spans`` are the chunks' stale rows.
        rope: turns keys; a row's position is its number.
        fresh: what the selector saw at its first check layer, of all stale rows; None where it looks at no K/V.
    """

    chosen_C: Tensor
    left_N: Tensor
    layout: Layout
    rope: Rope
    fresh: FreshKV | None


class Shift(NamedTuple):
    """What is added to the cached keys and values of the rows that stay, fp32 ``[H, N, D]``; None adds nothing."""

    keys_HND: Tensor | None = None
    values_HND: Tensor | None = None


Correction = Callable[[FreshKV], Shift]
"""One layer's shift, from fresh and cached K/V of the rows computed again (``FreshKV.rows_R`` are ``chosen_C``)."""


class Corrector(ABC):
    """Shifts the K/V of stale rows that are not computed again. Strategies are small frozen dataclasses.

    In every layer but the first (whose K/V depend on the token alone, so that cached ones are exact there), once fresh
    K/V of the running rows are known and before attention reads any, each stale row that does not run is shifted, once.
    Exact rows and rows that run are never touched. Where all stale rows run, or none, the corrector is not asked.

    Class attributes:

    * ``name``: in the report;
    * ``looks_ahead``: a row's shift may depend on later rows of its own chunk (never on later chunks).
    """

    name: ClassVar[str]
    looks_ahead: ClassVar[bool] = False

    @property
    def needs_check(self) -> bool:
        """Whether it works only with selectors that look at fresh K/V at a check layer."""
        return False

    @abstractmethod
    def plan(self, choice: Choice) -> Correction:
        """Called for each set of running rows, before the first layer in which they run alone."""
