"""Eviction policies against their conformance suite, and the suite against broken ones."""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter

import pytest

from blend.chunk import Retention
from blend.errors import BudgetError, StoreError
from blend.stores.eviction import (
    GDSF,
    LRU,
    POLICIES,
    Entry,
    EvictionQueue,
    Hotness,
    Policy,
    Priority,
    Random,
    policy_by_name,
)
from blend.testing.eviction import Bench, PolicyTests


class TestLRU(PolicyTests):
    cases = (
        ("put a", "put b", "put c", "use a", "out b c a"),
        ("put a", "put b", "put a", "out b a"),
        ("put a priority=0", "put b priority=100", "out a b"),
    )

    def make(self):
        return LRU()


class TestHotness(PolicyTests):
    cases = (
        # a: 2 uses, at seconds 1 and 2; b: one at 3. With a half-life of 10 s a has 0.87 + 0.93 and b 1.0.
        ("put a", "use a", "put b", "out b a"),
        # a's two uses are now 21 and 20 s old: 0.23 + 0.25, and b has 1.0.
        ("put a", "use a", "wait 19", "put b", "out a b"),
        # Three uses against two of about the same age.
        ("put a", "put b", "use b", "use a", "use a", "out b a"),
        # A new value keeps the uses of the old one.
        ("put a", "use a", "put a", "put b", "use b", "out b a"),
    )

    def make(self):
        return Hotness(half_life=10)

    @pytest.mark.parametrize("half_life", [0, -1, math.inf, math.nan])
    def test_an_impossible_half_life_is_refused(self, half_life):
        with pytest.raises(BudgetError, match="positive and finite"):
            Hotness(half_life)

    def test_the_score_is_the_sum_of_decayed_uses(self):
        policy, entry, times = Hotness(half_life=60), Entry("a", 1), [3.0, 5.0, 100.0, 101.5, 700.0]
        for uses, time in enumerate(times, 1):
            entry.uses, entry.used = uses, time
            entry.score = policy.score(entry)
        now = 1000.0
        hotness = sum(0.5 ** ((now - time) / 60) for time in times)
        assert 2 ** (entry.score[1] - now / 60) == pytest.approx(hotness, rel=1e-12)

    def test_years_of_seconds_still_tell_uses_apart(self):
        """Unix time: 2 to the power of time over half-life would not fit any float."""
        policy = Hotness(half_life=1.0)
        entry = Entry("a", 1, used=2e9)
        entry.score = policy.score(entry)
        entry.uses, entry.used = 2, 2e9
        assert policy.score(entry)[1] - entry.score[1] == pytest.approx(1.0), "two uses at once are twice as hot as one"


class TestPriority(PolicyTests):
    cases = (
        ("put a priority=50", "put b", "put c priority=10", "out c b a"),
        ("put a priority=80", "put b priority=80", "put c priority=80", "use a", "out b c a"),
        # a's priority holds until second 11.
        ("put a priority=90 duration=10", "put b", "put c", "out b", "wait 10", "put d", "out a c d"),
        # A low one rises to the default: from then on age decides.
        ("put a priority=1 duration=10", "put b", "wait 20", "use a", "put c priority=34", "out c b a"),
        ("put a priority=1 duration=100", "put b", "wait 20", "out a b"),
        # Put again without a duration, it stays.
        ("put a priority=90 duration=10", "put a priority=90", "put b", "wait 20", "out b a"),
    )

    def make(self):
        return Priority()

    def test_a_use_after_its_time_counts_as_default(self):
        """A store that keeps scores itself need not wait for a queue to notice."""
        entry = Entry("a", 1, priority=90, expires=10.0, used=9.0)
        assert Priority().score(entry) == (90, 9.0)
        entry.used = 10.0
        assert Priority().score(entry) == (35, 10.0)


class TestGDSF(PolicyTests):
    cases = (
        # Seconds per byte: a 0.5, b 2, c 1.
        ("put a cost=1 bytes=2", "put b cost=2", "put c cost=3 bytes=3", "out a c b"),
        # Used three times in all, a is worth 1.5.
        ("put a cost=1 bytes=2", "put b cost=2", "put c cost=1", "use a", "use a", "out c a b"),
        # L is 1 once a has left: c is worth 1 + 1.5 and b still 2.
        ("put a cost=1", "put b cost=2", "out a", "put c cost=3 bytes=2", "out b c"),
        # Without known costs bytes do not matter: uses do, then age.
        ("put a bytes=9", "put b", "put c bytes=5", "use b", "out a c b"),
        # An unknown cost counts as the mean rate, 1 s per byte here: between b and a.
        ("put a cost=3 bytes=2", "put b cost=1 bytes=2", "put c bytes=100", "out b c a"),
    )

    def make(self):
        return GDSF()

    def test_what_was_popular_once_leaves(self):
        bench = Bench(EvictionQueue, GDSF(), GDSF())
        bench.put("old", 1, Retention(cost=1.0))
        for _ in range(20):
            bench.use("old")
        gone = []
        for index in range(30):
            bench.put(f"k{index}", 1, Retention(cost=1.0))
            gone.append(bench.evict())
        assert gone.index("old") == 20, "worth 21, it leaves when L has passed 20"


class TestRandom(PolicyTests):
    # Where only one entry is without a mark, chance has no say: a round ends when all are marked.
    cases = (
        ("put a", "out a"),
        ("put a", "out a", "put b", "out b", "put c", "out c"),
    )

    def make(self):
        return Random()

    def test_marked_entries_stay_while_others_have_none(self):
        for seed in range(20):
            bench = Bench(EvictionQueue, Random(seed), Random(seed))
            for key in "abcd":
                bench.put(key)
            first = bench.evict()  # all four were marked, so a new round begins
            left = sorted(set("abcd") - {first})
            bench.use(left[0])
            bench.put("e")
            assert {bench.evict(), bench.evict()} == set(left[1:]), "those without a mark leave first"
            assert {bench.evict(), bench.evict()} == {left[0], "e"}

    def test_every_entry_is_as_likely(self):
        counts = Counter()
        for seed in range(600):
            bench = Bench(EvictionQueue, Random(seed), Random(seed))
            for key in "abc":
                bench.put(key)
            bench.use("a")
            counts[bench.evict()] += 1
        assert all(150 < counts[key] < 250 for key in "abc"), counts


# --- the names --------------------------------------------------------------------------------------------------------


def test_policies_are_found_by_name():
    assert list(POLICIES) == ["lru", "hotness", "priority", "gdsf", "random"]
    for name in POLICIES:
        assert policy_by_name(name).name == name
        assert policy_by_name(name) is not policy_by_name(name), "one object per store"


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(StoreError, match="'fifo': choose from lru, hotness, priority, gdsf, random"):
        policy_by_name("fifo")


def test_the_queue_reads_entries_without_booking_a_use():
    queue = EvictionQueue(LRU())
    queue.add("a", 3)
    entry = queue.get("a")
    assert (entry.nbytes, entry.uses) == (3, 1)
    assert queue.get("b") is None
    assert queue.get("a").uses == 1


def test_many_pins_do_not_slow_evictions_down():
    """Pinned entries are met once and put aside."""
    queue, pushes = EvictionQueue(LRU()), 0
    for index in range(2000):
        queue.add(index, 1)
        queue.pin(index)
    for index in range(2000, 2100):
        queue.add(index, 1)
    queue.evict()
    for index in range(2001, 2100):
        assert queue.evict().key == index
        pushes = max(pushes, len(queue._heap))
    assert pushes < 100
    assert queue.evict() is None
    queue.pin(7, -1)
    assert queue.evict().key == 7


# --- the suite finds broken policies and queues -----------------------------------------------------------------------


class MRU(LRU):
    def score(self, entry):
        return 0, -entry.used


class FIFO(LRU):
    def score(self, entry):
        return 0, entry.used if entry.uses == 1 else entry.score[1]


class Unseeded(LRU):
    def score(self, entry):
        return 0, max(entry.score[1], random.random())


class Infinite(LRU):
    def score(self, entry):
        return 0, 1e308 * 10 * entry.used


class WholeNumbers(LRU):
    def score(self, entry):
        return 0, int(entry.used)


class Untimed(Priority):
    timed = False


class GDSWithoutFrequency(GDSF):
    def score(self, entry):
        return 0, max(entry.score[1], self.floor + entry.cost / max(entry.nbytes, 1))


class NeverAges(GDSF):
    def evicted(self, entry):
        pass


class ForgetsItsFloor(GDSF):
    def resume(self, lowest):
        pass


class IgnoresPins(EvictionQueue):
    def pin(self, key, count=1):
        return key in self


class LosesBytes(EvictionQueue):
    def add(self, key, nbytes, retention=Retention()):  # noqa: B008
        known = self.nbytes if key in self else None
        super().add(key, nbytes, retention)
        if known is not None:
            self.nbytes = known + nbytes


class NeverPutRight(EvictionQueue):
    """Trusts the heap: whoever was lowest when it was put."""

    def evict(self):
        while self._heap:
            *_, turn, entry = heapq.heappop(self._heap)
            if entry.queued == turn and not entry.pins:
                self.remove(entry.key)
                self.policy.evicted(entry)
                return entry
        return None


class ForgetsToExpire(EvictionQueue):
    def _expire(self):
        pass


class Hoards(EvictionQueue):
    def _compact(self):
        pass


@pytest.mark.parametrize(
    ("suite", "policy", "queue", "test"),
    [
        (TestLRU, MRU, EvictionQueue, "test_a_use_never_lowers_the_score"),
        (TestLRU, MRU, EvictionQueue, "test_small_runs_worked_out_by_hand"),
        (TestLRU, FIFO, EvictionQueue, "test_small_runs_worked_out_by_hand"),
        (TestRandom, Unseeded, EvictionQueue, "test_equal_histories_give_equal_scores"),
        (TestRandom, Unseeded, EvictionQueue, "test_against_a_plain_search"),
        (TestLRU, Infinite, EvictionQueue, "test_scores_are_plain_numbers"),
        (TestLRU, WholeNumbers, EvictionQueue, "test_scores_are_plain_numbers"),
        (TestPriority, Untimed, EvictionQueue, "test_small_runs_worked_out_by_hand"),
        (TestGDSF, GDSWithoutFrequency, EvictionQueue, "test_small_runs_worked_out_by_hand"),
        (TestGDSF, NeverAges, EvictionQueue, "test_small_runs_worked_out_by_hand"),
        (TestGDSF, ForgetsItsFloor, EvictionQueue, "test_a_restart_forgets_no_order"),
        (TestLRU, LRU, IgnoresPins, "test_pinned_never_leaves"),
        (TestLRU, LRU, LosesBytes, "test_against_a_plain_search"),
        (TestLRU, LRU, NeverPutRight, "test_against_a_plain_search"),
        (TestPriority, Priority, ForgetsToExpire, "test_against_a_plain_search"),
        (TestPriority, Priority, Hoards, "test_only_what_is_held_is_remembered"),
    ],
)
def test_the_suite_finds(suite: type[PolicyTests], policy: type[Policy], queue: type[EvictionQueue], test: str):
    broken = type("Broken", (suite,), {"make": lambda self: policy(), "queue_type": queue})()
    with pytest.raises(AssertionError):
        getattr(broken, test)()
