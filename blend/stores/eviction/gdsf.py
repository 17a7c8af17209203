"""GreedyDual-Size-Frequency: what saves the fewest seconds per byte leaves first."""

from __future__ import annotations

from blend.stores.eviction.base import Entry, Policy, Score

__all__ = ["GDSF"]

ANY_RATE = 1e-8
"""Seconds per byte where no cost was ever known; any number would give the same order."""


class GDSF(Policy):
    """An entry's value is ``L + uses * cost / nbytes``; ``L`` is the value of whichever entry left last.

    Without ``L`` what was popular once would stay for ever; with it, an entry that is not used sinks in comparison
    (Cherkasova, HP Labs report HPL-98-69, 1998). Cost is the seconds that computing the entry took. RAGCache's PGDSF
    (arXiv 2404.12457) is this value with ``cost`` averaged over an entry's accesses, because there the cost of a node
    depends on how much of its prefix was there. A chunk's does not, so that here both are one and the same.

    Unknown costs are taken as in proportion to bytes, at the mean rate of the costs seen so far.

    Keeps in itself: ``L``, found again by :meth:`resume`, and the mean rate, which starts anew. Of several processes
    that share a store each has its own ``L``, that of the last entry which it evicted itself.
    """

    name = "gdsf"

    def __init__(self) -> None:
        self.floor = 0.0
        self._cost = 0.0
        self._nbytes = 0

    def score(self, entry: Entry) -> Score:
        nbytes = max(entry.nbytes, 1)
        if entry.cost > 0:
            self._cost += entry.cost
            self._nbytes += nbytes
            rate = entry.cost / nbytes
        else:
            rate = self._cost / self._nbytes if self._nbytes else ANY_RATE
        # The mean rate may have fallen since the use before.
        return 0, max(entry.score[1], self.floor + entry.uses * rate)

    def evicted(self, entry: Entry) -> None:
        self.floor = max(self.floor, entry.score[1])

    def resume(self, lowest: Score) -> None:
        self.floor = max(self.floor, lowest[1])
