"""In which order the passages that were found stand in the prompt. Every policy permutes them, and does no more.

Knows hits; what is known of a prompt's beginning, it is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from retrieval.document import Hit
from retrieval.errors import SettingError

__all__ = ["ORDERS", "Known", "Order", "best_last", "by_score", "cache_aware"]

Known = Callable[[Sequence[Hit]], int]
"""Rows of the longest prefix whose exact KV is known, of a prompt with these passages in this order."""

Order = Callable[[Sequence[Hit], Known, float], list[Hit]]
"""A policy as it stands in :data:`ORDERS`: hits, what is known, and the margin within which scores tie."""


def by_score(hits: Sequence[Hit]) -> list[Hit]:
    """Best first; of equal scores the earlier hit first."""
    return sorted(hits, key=lambda hit: -hit.score)


def best_last(hits: Sequence[Hit]) -> list[Hit]:
    """The best nearest to the question: models overlook most in the middle (Liu et al., "Lost in the Middle", 2023)."""
    return by_score(hits)[::-1]


def cache_aware(hits: Sequence[Hit], known: Known, margin: float = 0.0) -> list[Hit]:
    """Best first, and of passages whose scores tie the one first that goes on a known prefix.

    The prefix is exact: what it covers is neither computed nor approximated, so where scores tie, quality is had for
    nothing. Ties form runs: a run begins with the best hit left and holds all within ``margin`` of it. No hit leaves
    its run. Inside, the hit that lengthens the known prefix most comes next; where none does, the rest stays by score.
    The prefix is never shorter than with :func:`by_score`.

    Args:
        margin: 0 or more, in the scores' own scale.

    Raises:
        SettingError: a negative margin.
    """
    if not margin >= 0:
        raise SettingError(f"margin is {margin}: scores tie within 0 or more")
    ranked = by_score(hits)
    ordered: list[Hit] = []
    for run in _runs(ranked, margin):
        while len(run) > 1 and (place := _extending(ordered, run, known)) is not None:
            ordered.append(run.pop(place))
        ordered += run
    # A greedy choice can lead past a longer prefix.
    return ordered if ordered == ranked or known(ordered) > known(ranked) else ranked


def _runs(ranked: Sequence[Hit], margin: float) -> Iterator[list[Hit]]:
    """Cuts hits, best first, into runs of ties."""
    run: list[Hit] = []
    for hit in ranked:
        if run and run[0].score - hit.score > margin:
            yield run
            run = []
        run.append(hit)
    if run:
        yield run


def _extending(ordered: Sequence[Hit], run: Sequence[Hit], known: Known) -> int | None:
    """Place in ``run`` of the hit that lengthens the known prefix most behind ``ordered``; None if none does."""
    rows = [known([*ordered, hit]) for hit in run]
    longest = max(rows)
    return rows.index(longest) if longest > known(ordered) else None


ORDERS: dict[str, Order] = {
    "score": lambda hits, known, margin: by_score(hits),
    "best-last": lambda hits, known, margin: best_last(hits),
    "cache-aware": cache_aware,
}
"""The policies by name."""
