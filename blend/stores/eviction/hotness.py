"""Least frequently used, where a use counts for less the longer it is ago."""

from __future__ import annotations

import math

from blend.errors import BudgetError
from blend.stores.eviction.base import Entry, Policy, Score

__all__ = ["Hotness"]


class Hotness(Policy):
    """The coldest entry leaves first; each use adds 1 to an entry's hotness, and hotness halves every ``half_life``.

    Hotness as the measure of what to keep is HotPrefix's (Li et al., SIGMOD 2025, doi 10.1145/3749168). The score is

        log2 of the sum over all uses of 2 ** (time of use / half_life)

    that is, the hotness at time t is 2 ** (score - t / half_life). The part with t is the same for all entries, so an
    order once found stays right with no update of entries that are not touched ("forward decay": Cormode et al., ICDE
    2009). In the logarithm it neither overflows nor runs out of digits. Keeps nothing in itself: an entry's past is in
    its last score.

    Args:
        half_life: seconds. Infinite would be plain LFU, and near zero LRU; on an hour of chats (Mooncake's trace) in a
            twentieth of the room that they would fill, 120 found the most.

    Raises:
        BudgetError: it is not a positive, finite number.
    """

    name = "hotness"

    def __init__(self, half_life: float = 120.0) -> None:
        if not 0 < half_life < math.inf:
            raise BudgetError(f"half_life is {half_life} seconds: it must be positive and finite, such as 120")
        self.half_life = half_life

    def score(self, entry: Entry) -> Score:
        now = entry.used / self.half_life
        if entry.uses == 1:
            return 0, now
        past = entry.score[1]
        low, high = (past, now) if past < now else (now, past)
        return 0, high + math.log2(1.0 + 2.0 ** (low - high))
