"""The conformance suite of prefix caches: the longest prefix ever put in, found and right, against brute force.

::

    class TestMyPrefixCache(PrefixCacheTests):
        def make(self, limit=1 << 30):
            return MyPrefixCache(limit)

Any test runner that collects ``test_`` methods will do.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from blend.chunk import KVLayers, kv_bytes
from blend.prefix.base import PrefixCache, PrefixHit

__all__ = ["PrefixCacheTests", "exact_kv"]


class PrefixCacheTests:
    """Tests of one prefix cache. ``check()`` is called after every step."""

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
                ids = _related(draw, known)
                if draw.random() < 0.5:
                    cache.insert(ids, exact_kv(ids))
                    known.append(ids)
                else:
                    self._expect(cache, ids, _longest(ids, known))
                cache.check()

    def test_a_full_cache_forgets_and_never_lies(self) -> None:
        """Under a limit a hit may be shorter than brute force finds; its KV is right all the same."""
        limit = kv_bytes(exact_kv(tuple(range(40))))
        draw, cache, known = random.Random(0), self.make(limit), list[tuple[int, ...]]()
        for _ in range(200):
            ids = _related(draw, known)
            cache.insert(ids, exact_kv(ids))
            known.append(ids)
            cache.check()
            hit = cache.match(ids)
            assert hit is not None, "what was just put in, and fits, is found"
            assert hit.rows == len(ids), f"{hit.rows} of {len(ids)} rows that were just put in are found"
            self._right(hit, ids)
            wanted = _related(draw, known)
            hit = cache.match(wanted)
            cache.check()
            assert hit is None or hit.rows <= _longest(wanted, known)
            self._right(hit, wanted)

    def test_larger_than_the_limit(self) -> None:
        ids = tuple(range(10))
        cache = self.make(limit=kv_bytes(exact_kv(ids)) - 1)
        cache.insert(ids, exact_kv(ids))
        cache.check()
        self._right(cache.match(ids), ids)

    def test_any_sequence_type(self) -> None:
        cache = self.make()
        cache.insert([1, 2, 3], exact_kv((1, 2, 3)))
        self._expect(cache, [1, 2], 2)
        self._expect(cache, range(1, 9), 3)

    def test_threads_share_it(self) -> None:
        cache = self.make(limit=kv_bytes(exact_kv(tuple(range(60)))))

        def work(worker: int) -> None:
            draw = random.Random(worker)
            for _ in range(100):
                ids = tuple(draw.randrange(2) for _ in range(draw.randrange(1, 12)))
                cache.insert(ids, exact_kv(ids))
                self._right(cache.match(ids), ids)

        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(work, worker) for worker in range(8)]:
                done.result()
        cache.check()

    # --- tools ------------------------------------------------------------------------------------

    def _expect(self, cache: PrefixCache, ids: Sequence[int], rows: int) -> None:
        hit = cache.match(ids)
        cache.check()
        found = 0 if hit is None else hit.rows
        assert hit is None or rows > 0, f"a hit of {found} rows for {tuple(ids)}; None is the answer to nothing known"
        assert found == rows, f"{found} rows of {tuple(ids)} were found, and {rows} are known"
        self._right(hit, ids)

    def _right(self, hit: PrefixHit | None, ids: Sequence[int]) -> None:
        if hit is None:
            return
        truth = exact_kv(tuple(ids)[: hit.rows])
        for (keys, values), (true_keys, true_values) in zip(hit.layers, truth, strict=True):
            assert torch.equal(keys, true_keys), f"wrong keys for {tuple(ids)}"
            assert torch.equal(values, true_values), f"wrong values for {tuple(ids)}"


def exact_kv(ids: Sequence[int]) -> KVLayers:
    """What a model would compute for ``ids``: a row depends on its token and on all before it."""
    state, rows = 0, list[int]()
    for token in ids:
        state = (state * 31 + token + 1) % 1_000_003
        rows.append(state)
    column = torch.tensor(rows, dtype=torch.float32).reshape(1, -1, 1)
    # Two kv heads of dim 3 and values of dim 2, in two layers.
    return tuple((column.expand(2, -1, 3) + layer, column.expand(2, -1, 2) - layer) for layer in range(2))


def _related(draw: random.Random, known: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """A sequence that often starts like an earlier one."""
    start = draw.choice(known) if known and draw.random() < 0.8 else ()
    head = start[: draw.randint(0, len(start))]
    return (*head, *(draw.randrange(3) for _ in range(draw.randint(1, 6))))[:30]


def _longest(ids: Sequence[int], known: Iterable[Sequence[int]]) -> int:
    return max((_common(ids, other) for other in known), default=0)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
