"""A Hypothesis state machine of prefix caches: any order of verbs, against brute force, ``check()`` after every step.

::

    TestMyPrefixCache = prefix_machine(MyPrefixCache).TestCase
    TestMyFullPrefixCache = prefix_machine(MyPrefixCache, limit_rows=12).TestCase

``make`` is called with a limit in bytes. Needs hypothesis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from blend.prefix.base import PrefixCache, PrefixHit
from blend.testing.prefix_kv import ROW, exact_kv, same_layers

__all__ = ["prefix_machine"]

# Few tokens, so that sequences often start alike.
IDS = st.lists(st.integers(0, 1), max_size=16).map(tuple)
EXTRAS = st.sampled_from(("", "tenant"))

Ids = tuple[int, ...]


class _PrefixMachine(RuleBasedStateMachine):
    """What was put in, per ``extra``, is the truth; a full cache may find less of it, and never more."""

    make: Callable[[int], PrefixCache]
    limit_rows: int | None
    shares: bool
    pins: bool

    def __init__(self) -> None:
        super().__init__()
        self.limit = (1 << 30) if self.limit_rows is None else self.limit_rows * ROW
        self.cache = type(self).make(self.limit)
        self.known: dict[str, list[Ids]] = {"": [], "tenant": []}
        self.locked: list[tuple[PrefixHit, Ids, str]] = []
        self.lost = False  # something that was put in may be gone

    @rule(ids=IDS, extra=EXTRAS)
    def insert(self, ids: Ids, extra: str) -> None:
        before, truth = self.found(ids, extra), self.longest(ids, extra)
        new = self.cache.insert(ids, exact_kv(ids), extra=extra)
        whole = self.whole(len(ids))
        self.known[extra].append(ids)
        whole_truth = new == whole - truth
        assert whole_truth or self.lost or self.limit_rows is not None, (
            f"{new} new rows of {ids}, of which {truth} known"
        )
        self.lost = self.lost or not whole_truth or self.cache.stats().evicted_rows > 0
        assert self.found(ids, extra) == before + new, "what was known and what is new are found together"
        fits = len(ids) * ROW <= self.limit and not self.locked
        assert not fits or before + new == whole, "rows were left out that fit"

    @rule(ids=IDS, extra=EXTRAS)
    def match(self, ids: Ids, extra: str) -> None:
        rows, truth = self.found(ids, extra), self.longest(ids, extra)
        assert rows == truth or (self.lost and rows < truth), f"{rows} rows of {ids} are found, and {truth} known"

    @rule(ids=IDS, extra=EXTRAS)
    def lock(self, ids: Ids, extra: str) -> None:
        hit = self.cache.match(ids, extra=extra, lock=True)
        if hit is not None:
            self.locked.append((hit, ids, extra))

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        hit, ids, _ = self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1)))
        self.right(hit, ids)
        self.cache.unlock(hit)

    @rule(nbytes=st.integers(0, 20 * ROW))
    def evict(self, nbytes: int) -> None:
        before = self.cache.stats()
        freed = self.cache.evict(nbytes)
        after = self.cache.stats()
        self.lost = self.lost or freed > 0
        assert freed == before.nbytes - after.nbytes == (after.evicted_rows - before.evicted_rows) * ROW
        assert (self.locked and self.pins) or freed >= min(nbytes, before.nbytes)

    @invariant()
    def sound(self) -> None:
        self.cache.check()
        stats = self.cache.stats()
        assert stats.nbytes == stats.stored_rows * ROW <= self.limit
        assert stats.stored_rows <= stats.logical_rows
        if self.shares and not self.lost:
            assert stats.stored_rows == self.distinct()
        for _, ids, extra in self.locked if self.pins else ():
            assert self.found(ids, extra) >= max(h.rows for h, i, e in self.locked if (i, e) == (ids, extra))

    def teardown(self) -> None:
        """Everything can be given back."""
        for hit, ids, _ in self.locked:
            self.right(hit, ids)
            self.cache.unlock(hit)
        self.cache.evict(1 << 40)
        self.cache.check()
        assert self.cache.stats().nbytes == 0, "rows stay that nobody holds"

    # --- tools ------------------------------------------------------------------------------------

    def whole(self, rows: int) -> int:
        return rows - rows % self.cache.granularity

    def found(self, ids: Ids, extra: str) -> int:
        hit = self.cache.match(ids, extra=extra)
        if hit is None:
            return 0
        assert hit.rows
        self.right(hit, ids)
        return hit.rows

    def right(self, hit: PrefixHit, ids: Ids) -> None:
        assert same_layers(hit.layers, exact_kv(ids[: hit.rows])), f"wrong KV for {ids}"

    def longest(self, ids: Ids, extra: str) -> int:
        lengths = range(self.whole(len(ids)), 0, -self.cache.granularity)
        return next((n for n in lengths if any(known[:n] == ids[:n] for known in self.known[extra])), 0)

    def distinct(self) -> int:
        """Rows of all that was put in, each beginning counted once."""
        step = self.cache.granularity
        ends = (
            (x, ids, n) for x, several in self.known.items() for ids in several for n in range(step, len(ids) + 1, step)
        )
        return step * len({(extra, ids[:n]) for extra, ids, n in ends})


def prefix_machine(
    make: Callable[[int], PrefixCache], *, limit_rows: int | None = None, shares: bool = True, pins: bool = True
) -> type[RuleBasedStateMachine]:
    """The state machine of one prefix cache; its ``TestCase`` is collected by pytest and unittest.

    Args:
        make: an empty cache that holds so many bytes of KV.
        limit_rows: rows that fit; None for more than any run puts in.
        shares: see :class:`~blend.testing.PrefixCacheTests`.
        pins: see :class:`~blend.testing.PrefixCacheTests`.
    """
    members: dict[str, Any] = {"make": staticmethod(make), "limit_rows": limit_rows, "shares": shares, "pins": pins}
    machine: Any = type("PrefixMachine", (_PrefixMachine,), members)
    machine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, database=None)
    return machine  # type: ignore[no-any-return]
