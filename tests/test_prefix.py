"""Prefix caches against their conformance suite and their state machine; the pool; and that the suite finds faults."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from blend import BudgetError
from blend.errors import ForeignKV, StoreError
from blend.prefix import BlockPrefixCache, LinearPrefixCache, PrefixHit, RadixPrefixCache
from blend.prefix import pool as pool_module
from blend.prefix.pool import PagePool
from blend.stores.eviction import LRU, POLICIES
from blend.testing.prefix import PrefixCacheTests
from blend.testing.prefix_kv import ROW, exact_kv
from blend.testing.prefix_machine import prefix_machine


def blocks_of(rows):
    return lambda limit=1 << 30: BlockPrefixCache(limit, block=rows)


class TestLinearPrefixCache(PrefixCacheTests):
    shares = pins = False

    def make(self, limit=1 << 30):
        return LinearPrefixCache(limit)


class TestRadixPrefixCache(PrefixCacheTests):
    def make(self, limit=1 << 30):
        return RadixPrefixCache(limit)


class TestBlockPrefixCache(PrefixCacheTests):
    def make(self, limit=1 << 30):
        return BlockPrefixCache(limit)


class TestBlocksOfThree(PrefixCacheTests):
    def make(self, limit=1 << 30):
        return BlockPrefixCache(limit, block=3)


class TestBlocksOfOne(PrefixCacheTests):
    def make(self, limit=1 << 30):
        return BlockPrefixCache(limit, block=1)


class TestSmallSlabs(PrefixCacheTests):
    """Every sequence lies in several slabs."""

    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch):
        monkeypatch.setattr(pool_module, "_SLAB", 5 * ROW)

    def make(self, limit=1 << 30):
        return RadixPrefixCache(limit)


TestLinearMachine = prefix_machine(LinearPrefixCache, shares=False, pins=False).TestCase
TestRadixMachine = prefix_machine(RadixPrefixCache).TestCase
TestFullRadixMachine = prefix_machine(RadixPrefixCache, limit_rows=14).TestCase
TestBlocksOfOneMachine = prefix_machine(blocks_of(1), limit_rows=14).TestCase
TestBlocksOfThreeMachine = prefix_machine(blocks_of(3)).TestCase
TestFullBlocksOfThreeMachine = prefix_machine(blocks_of(3), limit_rows=14).TestCase


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("kind", [RadixPrefixCache, BlockPrefixCache])
def test_every_policy_serves(kind, policy):
    step = kind().granularity
    cache = kind(40 * step * ROW, policy=policy)
    draw = np.random.default_rng(0)
    for _ in range(120):
        ids = tuple(np.repeat(draw.integers(0, 2, size=draw.integers(1, 9)), step).tolist())
        hit = cache.match(ids, lock=True)
        cache.insert(ids, exact_kv(ids))
        if hit is not None:
            assert torch.equal(hit.layers[0][0], exact_kv(ids[: hit.rows])[0][0])
            cache.unlock(hit)
        cache.check()
    assert cache.stats().evicted_rows, "the limit was never reached, so no policy was asked"


# --- what each promises beyond the suite -----------------------------------------------------------


def test_radix_evicts_no_more_than_it_must():
    """The end of the least recently used leaf leaves, and its beginning stays."""
    cache = RadixPrefixCache(30 * ROW)
    old, new = tuple(range(25)), tuple(range(100, 110))
    cache.insert(old, exact_kv(old))
    assert cache.insert(new, exact_kv(new)) == 10
    assert cache.match(old).rows == 20
    cache.check()


def test_radix_splits_a_locked_run_and_the_lock_stays():
    cache = RadixPrefixCache()
    long, fork = tuple(range(10)), (0, 1, 2, 99)
    cache.insert(long, exact_kv(long))
    hit = cache.match(long[:6], lock=True)
    cache.insert(fork, exact_kv(fork))
    cache.evict(1 << 40)
    cache.check()
    assert cache.stats().stored_rows == 10, "the locked run is whole, the fork is gone"
    assert torch.equal(hit.layers[1][1], exact_kv(long[:6])[1][1])
    cache.unlock(hit)


def test_blocks_leave_from_the_tail_of_the_sequence_released_first():
    cache = BlockPrefixCache(12 * ROW, block=2)
    first, second = (1, 1, 2, 2, 3, 3), (1, 1, 4, 4, 5, 5)  # the first block is shared
    for ids in (first, second):
        cache.insert(ids, exact_kv(ids))
    found = []
    while cache.stats().nbytes:
        cache.evict(1)
        cache.check()
        found.append(tuple((hit.rows if (hit := _peek(cache, ids)) else 0) for ids in (first, second)))
    assert found == [(4, 6), (2, 6), (2, 4), (2, 2), (0, 0)]


def _peek(cache, ids):
    """A match that is no use."""
    hit, cache._leaves.use = None, lambda node: None
    try:
        hit = cache.match(ids)
    finally:
        del cache._leaves.use
    return hit


class OneByte(BlockPrefixCache):
    """Names that collide as soon as there are a few blocks."""

    bits = 0x0F

    def _name(self, parent, tokens):
        return bytes([sha256(parent.key + tokens).digest()[0] & self.bits])


def test_blocks_of_one_name_are_a_miss_and_never_wrong():
    cache, known = OneByte(block=2), []
    for token in range(0, 400, 4):
        ids = tuple(range(token, token + 4))
        new = cache.insert(ids, exact_kv(ids))
        cache.check()
        hit = cache.match(ids)
        assert (hit.rows if hit else 0) == new
        if hit:
            known.append(ids[:new])
            assert torch.equal(hit.layers[0][0], exact_kv(ids[:new])[0][0])
    assert 0 < cache.stats().stored_rows <= 32, "16 names, two rows each"
    assert all(cache.match(ids).rows == len(ids) for ids in known), "a later block took an earlier one's name"


def test_the_name_of_a_block_is_sha256_of_what_is_before_it():
    cache = BlockPrefixCache(block=2)
    cache.insert((1, 2, 3, 4, 5), exact_kv((1, 2, 3, 4, 5)), extra="tenant")
    name = sha256(b"tenant").digest()
    names = [name := sha256(name + np.array(ids, dtype=np.int64).tobytes()).digest() for ids in ((1, 2), (3, 4))]
    assert list(cache._table) == names


def test_memory_is_taken_as_it_is_needed(monkeypatch):
    monkeypatch.setattr(pool_module, "_SLAB", 8 * ROW)
    cache = RadixPrefixCache(1 << 30)
    held = [0]
    for number in range(4):
        ids = tuple(range(number * 100, number * 100 + 8))
        cache.insert(ids, exact_kv(ids))
        held.append(sum(x.untyped_storage().nbytes() for slab in cache._pool._slabs for x in slab))
    assert held == [0, 8 * ROW, 16 * ROW, 24 * ROW, 32 * ROW]
    cache.evict(1 << 40)
    assert not cache._pool._slabs, "an empty cache gives its memory back"


def test_a_cache_emptied_takes_kv_of_another_form():
    cache = RadixPrefixCache()
    cache.insert((1, 2), exact_kv((1, 2)))
    cache.evict(1 << 40)
    halves = tuple((keys.half(), values.half()) for keys, values in exact_kv((1, 2)))
    assert cache.insert((1, 2), halves) == 2
    assert cache.match((1, 2)).layers[0][0].dtype == torch.float16


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_hits_are_plain_tensors_whatever_mode_they_were_made_in(context):
    cache = RadixPrefixCache()
    with context():
        layers = tuple((keys.clone(), values.clone()) for keys, values in exact_kv((1, 2, 3)))
        cache.insert((1, 2, 3), layers)
        hit = cache.match((1, 2, 3))
    tensors = [x for pair in (*hit.layers, *cache.match((1,)).layers) for x in pair]
    assert not any(x.is_inference() or x.requires_grad for x in tensors)
    assert all(x.is_contiguous() for x in tensors)
    cache.insert((1, 2, 9), exact_kv((1, 2, 9)))


def test_kv_with_a_gradient_goes_in():
    keys = torch.randn(1, 3, 2, requires_grad=True)
    cache = RadixPrefixCache()
    cache.insert((1, 2, 3), ((keys, keys * 2),))
    found = cache.match((1, 2, 3)).layers[0]
    assert torch.equal(found[0], keys)
    assert not found[0].requires_grad


def test_the_pool_hands_out_rising_runs_and_every_page_once():
    pool = PagePool(100 * ROW, 1)
    pool.admit(exact_kv((1,)), 1)
    a, b = pool.take(30), pool.take(30)
    pool.give(a)
    c = pool.take(40)
    numbers = [np.frombuffer(x, dtype=np.int64).tolist() for x in (b, c)]
    assert numbers == [list(range(30, 60)), [*range(30), *range(60, 70)]]
    pool.check([b, c])
    with pytest.raises(AssertionError, match="lost"):
        pool.check([b])


# --- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, -1])
@pytest.mark.parametrize("kind", [LinearPrefixCache, RadixPrefixCache, BlockPrefixCache])
def test_a_cache_without_room_is_refused(kind, limit):
    with pytest.raises(BudgetError, match="positive"):
        kind(limit)


@pytest.mark.parametrize("block", [0, -16])
def test_blocks_need_rows(block):
    with pytest.raises(StoreError, match=f"{block} rows"):
        BlockPrefixCache(block=block)


def test_an_unknown_policy_is_named_with_those_there_are():
    with pytest.raises(StoreError, match=r"mru.*lru"):
        RadixPrefixCache(policy="mru")
    policy = LRU()
    assert RadixPrefixCache(policy=policy).policy is policy


@pytest.mark.parametrize("kind", [RadixPrefixCache, BlockPrefixCache])
def test_kv_that_does_not_fit_the_tokens_is_refused(kind):
    cache = kind()
    with pytest.raises(StoreError, match=r"3 tokens: \[H, 3, D\]"):
        cache.insert((1, 2, 3), exact_kv((1, 2)))
    cache.check()
    assert cache.insert(tuple(range(32)), exact_kv(range(32))) == 32, "it decided nothing about the form of a row"


@pytest.mark.parametrize("kind", [RadixPrefixCache, BlockPrefixCache])
def test_kv_of_another_form_is_refused(kind):
    cache = kind()
    ids = tuple(range(16))
    cache.insert(ids, exact_kv(ids))
    halves = tuple((keys.half(), values.half()) for keys, values in exact_kv(ids))
    for foreign in (halves, exact_kv(ids)[:1]):
        with pytest.raises(ForeignKV, match=r"2 layers.*one prefix cache per model"):
            cache.insert(ids, foreign)
        cache.check()
    assert cache.match(ids).rows == 16


def test_a_lock_is_given_back_once():
    cache = RadixPrefixCache()
    cache.insert((1, 2, 3), exact_kv((1, 2, 3)))
    with pytest.raises(StoreError, match="not locked"):
        cache.unlock(cache.match((1, 2, 3)))
    hit = cache.match((1, 2, 3), lock=True)
    cache.unlock(hit)
    with pytest.raises(StoreError, match="not locked"):
        cache.unlock(hit)
    with pytest.raises(StoreError, match=r"read hit\.layers first"):
        hit.layers  # noqa: B018  # reading is what fails
    cache.check()


# --- the suite finds faults ------------------------------------------------------------------------


class LastOnly(LinearPrefixCache):
    """Forgets all but the last sequence."""

    def insert(self, ids, layers, *, extra=""):
        self._entries.clear()
        return super().insert(ids, layers, extra=extra)


class AnyPlace(LastOnly):
    """Finds the tokens wherever they stand."""

    def match(self, ids, **options):
        for _, known in self._entries:
            known = tuple(np.frombuffer(known, dtype=np.int64))
            for start in range(len(known)):
                if tuple(ids) == known[start : start + len(ids)] and ids:
                    return PrefixHit(len(ids), lambda known=known: exact_kv(known[: len(ids)]))
        return super().match(ids, **options)


class WrongRows(LastOnly):
    """Hands out the KV of the end of what it knows."""

    def match(self, ids, **options):
        hit = super().match(ids, **options)
        return hit and PrefixHit(hit.rows, lambda: tuple((k + 1, v) for k, v in hit.layers))


class OneRoot(RadixPrefixCache):
    """Does not look at extra."""

    def _root_key(self, extra):
        return ""


class Unlocked(RadixPrefixCache):
    """Hands out locks that lock nothing."""

    def match(self, ids, *, extra="", lock=False):
        hit = super().match(ids, extra=extra, lock=lock)
        if lock and hit:
            hit.handle.node.pins -= 1
            self._leases -= 1
            self._settle(hit.handle.node)
        return hit

    def unlock(self, hit):
        pass


class NeverUnlocked(RadixPrefixCache):
    """Keeps every lock."""

    def unlock(self, hit):
        pass


class LateReader(RadixPrefixCache):
    """Reads an unlocked hit when it is asked for, and not before."""

    def match(self, ids, *, extra="", lock=False):
        hit = super().match(ids, extra=extra, lock=True)
        if hit and not lock:
            node = hit.handle.node
            self.unlock(hit)
            hit.handle.node = node
        return hit


class Boaster(RadixPrefixCache):
    """Says that everything was new."""

    def insert(self, ids, layers, *, extra=""):
        super().insert(ids, layers, extra=extra)
        return len(ids)


class Miser(RadixPrefixCache):
    """Frees a row at most."""

    def evict(self, nbytes):
        return super().evict(min(nbytes, 1))


class MostRecent(RadixPrefixCache):
    """The most recently used leaves first."""

    def __init__(self, limit=1 << 30):
        super().__init__(limit)
        self._leaves._clock = iter(range(1 << 30, 0, -1)).__next__


class Alias(LinearPrefixCache):
    """Keeps the caller's own tensors."""

    def insert(self, ids, layers, *, extra=""):
        new = super().insert(ids, layers, extra=extra)
        for key, (known, _) in self._entries.items():
            self._entries[key] = (known, layers)
        return new


class Coarse(LinearPrefixCache):
    """Promises multiples of 4, and finds any number."""

    granularity = 4


class Floats(RadixPrefixCache):
    """Hands everything out as float32."""

    def match(self, ids, **options):
        hit = super().match(ids, **options)
        return hit and PrefixHit(hit.rows, lambda: tuple((k.float(), v.float()) for k, v in hit.layers))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("test_against_brute_force", LastOnly),
        ("test_branches", LastOnly),
        ("test_a_longer_sequence_over_a_shorter_and_back", LastOnly),
        ("test_first_tokens_must_agree", AnyPlace),
        ("test_whole_sequence_and_its_parts", WrongRows),
        ("test_a_full_cache_forgets_and_never_lies", WrongRows),
        ("test_extra_keeps_sequences_apart", OneRoot),
        ("test_a_shared_beginning_is_held_once", LinearPrefixCache),
        ("test_locked_rows_survive_pressure", Unlocked),
        ("test_where_all_is_locked_nothing_is_stored", Unlocked),
        ("test_where_all_is_locked_nothing_is_stored", LinearPrefixCache),
        ("test_where_all_is_locked_nothing_is_stored", NeverUnlocked),
        ("test_unlocked_rows_can_be_evicted", NeverUnlocked),
        ("test_a_hit_stays_right_when_its_rows_are_gone", LateReader),
        ("test_insert_tells_the_new_rows", Boaster),
        ("test_evict_frees_what_is_asked", Miser),
        ("test_the_least_recently_used_leaves", MostRecent),
        ("test_what_the_caller_does_later_stays_outside", Alias),
        ("test_a_hit_is_a_multiple_of_the_granularity", Coarse),
        ("test_layers_of_any_form_come_back_bit_for_bit", Floats),
    ],
)
def test_the_suite_finds_a_broken_cache(name, kind):
    suite = type("T", (PrefixCacheTests,), {"make": lambda self, limit=1 << 30: kind(limit)})
    with pytest.raises(AssertionError):
        getattr(suite(), name)()


@pytest.mark.parametrize("kind", [LastOnly, WrongRows, OneRoot, Unlocked, NeverUnlocked, Boaster, Miser, Coarse])
def test_the_machine_finds_a_broken_cache(kind):
    machine = prefix_machine(kind, shares=issubclass(kind, RadixPrefixCache))
    first = settings(machine.TestCase.settings, phases=[Phase.generate], derandomize=True, report_multiple_bugs=False)
    with pytest.raises((AssertionError, IndexError)):  # the latter: KV read from pages that are no more
        run_state_machine_as_test(machine, settings=first)
