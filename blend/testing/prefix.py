"""The conformance suite of prefix caches: the longest prefix ever put in, found and right, against brute force.

::

    class TestMyPrefixCache(PrefixCacheTests):
        def make(self, limit=1 << 30):
            return MyPrefixCache(limit)

Any test runner that collects ``test_`` methods will do. Beside it stands a state machine that draws long random runs:
:mod:`blend.testing.prefix_machine`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from blend.prefix.base import PrefixCache, PrefixHit
from blend.testing.prefix_kv import ROW, exact_kv, longest, odd_kv, other_kv, related, run, same_layers

__all__ = ["PrefixCacheTests", "exact_kv"]


class PrefixCacheTests:
    """Tests of one prefix cache. ``check()`` is called after every step.

    Attributes:
        shares: a beginning that sequences share is held once.
        pins: locked rows are found again until they are unlocked (their KV is right in any case).
    """

    shares: bool = True
    pins: bool = True

    def make(self, limit: int = 1 << 30) -> PrefixCache:
        """An empty cache that holds ``limit`` bytes of KV."""
        raise NotImplementedError("a subclass says how its prefix cache is made")

    def test_empty(self) -> None:
        cache = self.make()
        cache.check()
        assert cache.match((1, 2, 3)) is None
        assert cache.match(()) is None

    def test_nothing_put_in_is_nothing_found(self) -> None:
        cache = self.make()
        cache.insert((), exact_kv(()))
        cache.check()
        assert cache.match((1, 2)) is None

    def test_whole_sequence_and_its_parts(self) -> None:
        cache = self.make()
        known = (5, 6, 7, 8)
        cache.insert(known, exact_kv(known))
        for wanted, rows in ((known, 4), (known[:2], 2), ((*known, 9), 4), ((5, 6, 9, 9), 2), ((6, 7), 0), ((), 0)):
            self._expect(cache, wanted, rows)

    def test_a_longer_sequence_over_a_shorter_and_back(self) -> None:
        short, long = (1, 2, 3), (1, 2, 3, 4, 5)
        for order in ((short, long), (long, short)):
            cache = self.make()
            for ids in order:
                cache.insert(ids, exact_kv(ids))
                cache.check()
            self._expect(cache, (1, 2, 3, 4, 5, 6), 5)

    def test_branches(self) -> None:
        cache = self.make()
        for tail in ((7, 8), (9,), (7, 9, 9), ()):
            ids = (1, 2, 3, *tail)
            cache.insert(ids, exact_kv(ids))
            cache.check()
        for wanted, rows in (((1, 2, 3, 7, 8, 0), 5), ((1, 2, 3, 7, 9, 1), 5), ((1, 2, 3, 9), 4), ((1, 2, 4), 2)):
            self._expect(cache, wanted, rows)

    def test_first_tokens_must_agree(self) -> None:
        """The same tokens further on are no prefix."""
        cache = self.make()
        cache.insert((1, 2, 3, 4), exact_kv((1, 2, 3, 4)))
        self._expect(cache, (2, 3, 4), 0)

    def test_against_brute_force(self) -> None:
        for seed in range(5):
            draw, cache, known = random.Random(seed), self.make(), list[tuple[int, ...]]()
            for _ in range(80):
                ids = related(draw, known)
                if draw.random() < 0.5:
                    cache.insert(ids, exact_kv(ids))
                    known.append(ids)
                else:
                    self._expect(cache, ids, longest(ids, known))
                cache.check()

    def test_a_full_cache_forgets_and_never_lies(self) -> None:
        """Under a limit a hit may be shorter than brute force finds; its KV is right all the same."""
        limit = 40 * ROW
        draw, cache, known = random.Random(0), self.make(limit), list[tuple[int, ...]]()
        for _ in range(200):
            ids = related(draw, known)
            cache.insert(ids, exact_kv(ids))
            known.append(ids)
            cache.check()
            hit = cache.match(ids)
            found = 0 if hit is None else hit.rows
            assert found == len(ids) - len(ids) % cache.granularity, f"{found} of {len(ids)} rows just put in are found"
            self._right(hit, ids)
            wanted = related(draw, known)
            hit = cache.match(wanted)
            cache.check()
            assert hit is None or hit.rows <= longest(wanted, known)
            self._right(hit, wanted)

    def test_larger_than_the_limit(self) -> None:
        ids = tuple(range(10))
        cache = self.make(limit=10 * ROW - 1)
        cache.insert(ids, exact_kv(ids))
        cache.check()
        self._right(cache.match(ids), ids)

    def test_any_sequence_type(self) -> None:
        cache = self.make()
        cache.insert([1, 2, 3], exact_kv((1, 2, 3)))
        self._expect(cache, [1, 2], 2)
        self._expect(cache, range(1, 9), 3)

    def test_a_hit_is_a_multiple_of_the_granularity(self) -> None:
        cache = self.make()
        step = cache.granularity
        ids = run(1, 3 * step + step // 2)
        assert cache.insert(ids, exact_kv(ids)) == len(ids) // step * step, "the rows that fill whole blocks are kept"
        for rows in range(len(ids) + 1):
            self._expect(cache, (*ids[:rows], 7, 7), rows)

    # --- sequences apart, and together ------------------------------------------------------------

    def test_extra_keeps_sequences_apart(self) -> None:
        cache = self.make()
        ids = run(1, 3 * cache.granularity)
        cache.insert(ids, exact_kv(ids), extra="a")
        cache.check()
        for other in ("", "b", "aa"):
            assert cache.match(ids, extra=other) is None, f"what was put in for 'a' is found for {other!r}"
        longer = (*ids, *run(2, cache.granularity))
        cache.insert(longer, other_kv(longer), extra="b")
        cache.check()
        hits = cache.match(longer, extra="a"), cache.match(longer, extra="b")
        assert hits[0] is not None
        assert hits[1] is not None
        assert (hits[0].rows, hits[1].rows) == (len(ids), len(longer))
        assert same_layers(hits[0].layers, exact_kv(ids))
        assert same_layers(hits[1].layers, other_kv(longer))

    def test_a_shared_beginning_is_held_once(self) -> None:
        cache = self.make()
        step = cache.granularity
        shared, users = run(0, 10 * step), 5
        for user in range(1, users + 1):
            ids = (*shared, *run(user, 2 * step))
            cache.insert(ids, exact_kv(ids))
            cache.check()
        held = (10 + 2 * users if self.shares else 12 * users) * step
        stats = cache.stats()
        assert (stats.stored_rows, stats.logical_rows) == (held, 12 * step * users)
        assert stats.nbytes == held * ROW
        assert stats.dedup_ratio == 12 * step * users / held

    def test_insert_tells_the_new_rows(self) -> None:
        cache = self.make()
        step = cache.granularity
        ids, fork = run(1, 6 * step), (*run(1, 4 * step), *run(2, 3 * step))
        for added, new in ((ids[: 4 * step], 4), (ids, 2), (ids, 0), (ids[:step], 0), (fork, 3), ((), 0)):
            assert cache.insert(added, exact_kv(added)) == new * step
            cache.check()

    def test_what_is_asked_and_found_is_counted(self) -> None:
        cache = self.make()
        ids = run(1, 4 * cache.granularity)
        cache.insert(ids, exact_kv(ids))
        cache.match(ids[: 2 * cache.granularity])
        cache.match(run(2, 2 * cache.granularity))
        assert cache.stats().hit_rate == 0.5
        assert cache.evict(1 << 40) == cache.stats().evicted_rows * ROW == len(ids) * ROW
        assert cache.stats().stored_rows == cache.stats().nbytes == 0

    # --- KV ---------------------------------------------------------------------------------------

    def test_what_the_caller_does_later_stays_outside(self) -> None:
        cache = self.make()
        ids = run(1, 2 * cache.granularity)
        layers = tuple((keys.clone(), values.clone()) for keys, values in exact_kv(ids))
        cache.insert(ids, layers)
        for keys, values in layers:
            keys.zero_()
            values.fill_(7)
        self._expect(cache, ids, len(ids))

    def test_a_hit_stays_right_when_its_rows_are_gone(self) -> None:
        cache = self.make()
        ids = run(1, 4 * cache.granularity)
        cache.insert(ids, exact_kv(ids))
        hit = cache.match(ids)
        cache.evict(1 << 40)
        other = run(2, 4 * cache.granularity)
        cache.insert(other, exact_kv(other))
        self._right(hit, ids)

    def test_layers_of_any_form_come_back_bit_for_bit(self) -> None:
        cache = self.make()
        step = cache.granularity
        ids, fork = run(1, 5 * step), (*run(1, 2 * step), *run(2, 4 * step))
        forms = odd_kv(ids)
        cache.insert(ids, forms)
        cache.insert(fork, tuple((keys[:, : 2 * step].repeat(1, 3, 1), values[:, : 2 * step].repeat(1, 3, 1))
                                 for keys, values in forms))  # fmt: skip
        cache.check()
        hit = cache.match(ids)
        assert hit is not None
        assert same_layers(hit.layers, forms)

    # --- locks ------------------------------------------------------------------------------------

    def test_locked_rows_survive_pressure(self) -> None:
        step = self.make().granularity
        cache = self.make(limit=20 * step * ROW)
        ids = run(0, 8 * step)
        cache.insert(ids, exact_kv(ids))
        hit = cache.match((*ids[: 6 * step], 7, 7), lock=True)
        assert hit is not None
        for number in range(1, 12):
            # Some of them leave the locked sequence half-way.
            other = (*ids[: number % 3 * 2 * step], *run(number, 9 * step))
            cache.insert(other, exact_kv(other))
            cache.check()
            again = cache.match(ids)
            assert not self.pins or (again is not None and again.rows >= hit.rows), "locked rows were dropped"
        assert cache.evict(1 << 40) >= 0
        assert not self.pins or cache.stats().stored_rows >= hit.rows, "locked rows were dropped"
        assert hit.rows == 6 * step
        self._right(hit, ids)
        cache.unlock(hit)
        cache.check()

    def test_where_all_is_locked_nothing_is_stored(self) -> None:
        step = self.make().granularity
        cache = self.make(limit=4 * step * ROW)
        ids, other = run(1, 4 * step), run(2, 3 * step)
        cache.insert(ids, exact_kv(ids))
        first, second = cache.match(ids, lock=True), cache.match(ids, lock=True)
        assert first is not None
        assert second is not None
        for hit in (first, second):
            new = cache.insert(other, exact_kv(other))
            assert not self.pins or new == 0, "there was no room"
            assert not self.pins or cache.evict(1) == 0, "locked rows were dropped"
            cache.check()
            self._right(hit, ids)
            cache.unlock(hit)
            cache.check()
        cache.insert(other, exact_kv(other))  # what is unlocked makes room
        self._expect(cache, other, len(other))

    def test_unlocked_rows_can_be_evicted(self) -> None:
        cache = self.make()
        ids = run(1, 4 * cache.granularity)
        cache.insert(ids, exact_kv(ids))
        hit = cache.match(ids, lock=True)
        assert hit is not None
        self._right(hit, ids)
        cache.unlock(hit)
        assert cache.evict(1 << 40) == len(ids) * ROW, "rows that nobody holds stayed"
        cache.check()
        assert cache.match(ids) is None
        self._right(hit, ids)

    def test_evict_frees_what_is_asked(self) -> None:
        cache = self.make()
        step = cache.granularity
        for number in range(6):
            ids = (*run(0, 2 * step), *run(1 + number, 5 * step))
            cache.insert(ids, exact_kv(ids))
        assert cache.evict(0) == 0
        for asked in (1, ROW, 3 * step * ROW + 1, 11 * step * ROW, 1 << 40):
            before = cache.stats()
            freed = cache.evict(asked)
            cache.check()
            assert freed == before.nbytes - cache.stats().nbytes, "it freed what it says"
            assert freed >= min(asked, before.nbytes), f"{asked} bytes were asked for, and {freed} freed"
        assert cache.stats().nbytes == 0

    def test_the_least_recently_used_leaves(self) -> None:
        step = self.make().granularity
        cache = self.make(limit=9 * step * ROW)
        runs = [run(number, 3 * step) for number in range(4)]
        for ids in runs[:3]:
            cache.insert(ids, exact_kv(ids))
        self._expect(cache, runs[0], 3 * step)
        cache.insert(runs[3], exact_kv(runs[3]))
        for ids, rows in zip(runs, (3, 0, 3, 3), strict=True):
            self._expect(cache, ids, rows * step)

    # --- threads ----------------------------------------------------------------------------------

    def test_threads_share_it(self) -> None:
        cache = self.make(limit=60 * ROW)

        def work(worker: int) -> None:
            draw = random.Random(worker)
            for _ in range(100):
                ids = tuple(draw.randrange(2) for _ in range(draw.randrange(1, 12)))
                cache.insert(ids, exact_kv(ids))
                self._right(cache.match(ids), ids)
                hit = cache.match(ids, lock=True)
                if hit is not None:
                    if draw.random() < 0.2:
                        cache.evict(10 * ROW)
                    self._right(hit, ids)
                    cache.unlock(hit)

        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(work, worker) for worker in range(8)]:
                done.result()
        cache.check()

    # --- tools ------------------------------------------------------------------------------------

    def _expect(self, cache: PrefixCache, ids: Sequence[int], rows: int) -> None:
        hit = cache.match(ids)
        cache.check()
        rows -= rows % cache.granularity
        found = 0 if hit is None else hit.rows
        assert hit is None or rows > 0, f"a hit of {found} rows for {tuple(ids)}; None is the answer to nothing known"
        assert found == rows, f"{found} rows of {tuple(ids)} were found, and {rows} are known"
        self._right(hit, ids)

    def _right(self, hit: PrefixHit | None, ids: Sequence[int]) -> None:
        if hit is not None:
            assert same_layers(hit.layers, exact_kv(tuple(ids)[: hit.rows])), f"wrong KV for {tuple(ids)}"
