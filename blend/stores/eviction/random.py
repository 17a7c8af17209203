"""Random among those not used lately: randomised marking."""

from __future__ import annotations

import random

from blend.stores.eviction.base import Entry, Policy, Score

__all__ = ["Random"]


class Random(Policy):
    """A use marks an entry; one without a mark, drawn at random, leaves; when all are marked, all lose their marks.

    Against the worst order of requests LRU may miss n times as often as the best possible policy, n being the entries
    that fit; randomised marking 2 ln n times (Fiat et al., J. Algorithms 12, 1991). Wu et al. (arXiv 2601.18999) carry
    a bound of this order over to the leaves of a prefix tree. The band is the round in which the mark was set, the
    value is the draw: what was marked in an earlier round has none now.

    Keeps in itself: the round, found again by :meth:`resume`, and the generator's state.

    Args:
        seed: of the draws; two stores with equal histories evict alike.
    """

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self.round = 0
        self._draw = random.Random(seed).random

    def score(self, entry: Entry) -> Score:
        if entry.uses > 1 and entry.score[0] >= self.round:
            return entry.score
        return self.round, self._draw()

    def evicted(self, entry: Entry) -> None:
        if entry.score[0] >= self.round:  # nothing older was left
            self.round = entry.score[0] + 1

    def resume(self, lowest: Score) -> None:
        self.round = max(self.round, lowest[0] + 1)
