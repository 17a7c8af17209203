"""The memory store against the conformance suites, and the suites against stores that are broken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from blend import BudgetError, MemoryStore
from blend.chunk import Retention
from blend.errors import StoreError, StoreUnavailable
from blend.stores import Store
from blend.stores.codecs import Codec
from blend.testing.store_machine import store_machine
from blend.testing.stores import StoreTests, close_kv, same_kv, tiny_kv

SIZE = tiny_kv("x").nbytes
QUICK = settings(
    deadline=None, max_examples=30, stateful_step_count=30, suppress_health_check=list(HealthCheck), database=None
)


class Halves(Codec):
    """Keeps float16 of whatever comes: small, and no test of what the shipped codecs do."""

    name = "halves"

    def encode(self, keys, values):
        return {"key": keys.half().cpu(), "value": values.half().cpu()}

    def decode(self, parts: Mapping, spec):
        return parts["key"].to(spec.key_dtype), parts["value"].to(spec.value_dtype)


class TestMemoryStore(StoreTests):
    def make(self, limit=1 << 30):
        return MemoryStore(limit)


class TestMemoryStoreThatEncodes(StoreTests):
    lossless = False
    tolerance = 1e-3

    def make(self, limit=1 << 30):
        return MemoryStore(limit, codec=Halves())

    def entry_size(self, kv):
        return sum(2 * x.numel() for pair in kv.layers for x in pair)


@pytest.mark.parametrize("policy", ["lru", "hotness", "priority", "gdsf", "random"])
@pytest.mark.parametrize("limit", [1 << 30, 4 * SIZE], ids=["roomy", "tight"])
def test_state_machine(policy, limit):
    machine = store_machine(lambda: MemoryStore(limit, policy=policy), forgets=limit < 1 << 30)
    run_state_machine_as_test(machine, settings=settings(QUICK, max_examples=10))


def test_the_longest_unused_entry_goes_first():
    store = MemoryStore(3 * SIZE)
    for key in "abc":
        store.put(tiny_kv(key))
    store.get("a")
    store.put(tiny_kv("d"))
    assert sorted(store.keys()) == ["a", "c", "d"]
    assert store.stats.evicted == 1
    assert store.nbytes == 3 * SIZE


def test_retention_reaches_the_policy():
    store = MemoryStore(3 * SIZE, policy="priority")
    for key, priority in zip("abc", (90, 10, 50), strict=True):
        store.put(replace(tiny_kv(key), retention=Retention(priority=priority)))
    store.put(tiny_kv("d"))
    store.put(tiny_kv("e"))
    assert sorted(store.keys()) == ["a", "c", "e"]


def test_a_put_beyond_the_limit_leaves_the_entry_of_that_name():
    store = MemoryStore(2 * SIZE)
    store.put(tiny_kv("a"))
    assert not store.put(tiny_kv("a", rows=50))
    assert same_kv(store.get("a"), tiny_kv("a"))
    assert store.stats.refused == 1


def test_a_codec_keeps_what_it_encodes_and_the_limit_counts_that():
    store = MemoryStore(codec=Halves())
    kv = tiny_kv("a", rows=100)
    store.put(kv)
    assert store.codec == "halves"
    assert store.nbytes == kv.nbytes / 2
    assert close_kv(store.get("a"), kv, 1e-3)
    assert store.get("a").layers[0][0].dtype == torch.float32
    assert store.stats.bytes_read == kv.nbytes


def test_encoded_layers_are_decoded_one_by_one():
    calls = []

    class Counts(Halves):
        def decode(self, parts, spec):
            calls.append(1)
            return super().decode(parts, spec)

    store = MemoryStore(codec=Counts())
    store.put(tiny_kv("a"))
    (lazy,) = store.get_many(["a"], layerwise=True)
    assert len(calls) == 0
    lazy.layers[1]
    assert len(calls) == 1


def test_a_codec_that_changes_nothing_shares_nothing():
    """float16 goes through the codec as it is, and must be copied all the same."""
    store, kv = MemoryStore(codec=Halves()), tiny_kv("a", dtype=torch.float16)
    store.put(kv)
    for keys, values in kv.layers:
        keys.zero_()
        values.zero_()
    assert same_kv(store.get("a"), tiny_kv("a", dtype=torch.float16))


@pytest.mark.parametrize("limit", [0, -1])
def test_a_store_without_room_is_refused(limit):
    with pytest.raises(BudgetError, match="positive"):
        MemoryStore(limit)


def test_unknown_names_are_refused():
    with pytest.raises(StoreError, match="no codec 'zip'"):
        MemoryStore(codec="zip")
    with pytest.raises(StoreError, match="no eviction policy 'fifo'"):
        MemoryStore(policy="fifo")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
def test_pinned_memory_needs_cuda():
    with pytest.raises(StoreUnavailable, match="leave it out"):
        MemoryStore(pin_memory=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory needs CUDA")
def test_pinned_memory():
    store = MemoryStore(pin_memory=True)
    store.put(tiny_kv("a"))
    assert all(x.is_pinned() for pair in store.get("a").layers for x in pair)
    assert same_kv(store.get("a"), tiny_kv("a"))


# --- the suites find what is broken -------------------------------------------------------------------


class Broken(Store):
    """A dict, and hooks for bugs."""

    def __init__(
        self,
        limit,
        spoil_put=lambda kv: kv,
        spoil_get=lambda kv: kv,
        spoil_key=lambda key: key,
        get_many=lambda found: found,
        pins=False,
        sticky=False,
    ):
        self.entries = {}
        self.bug = SimpleNamespace(put=spoil_put, get=spoil_get, key=spoil_key, many=get_many, pins=pins, sticky=sticky)

    def get(self, key):
        return self.bug.get(self.entries.get(self.bug.key(key)))

    def get_many(self, keys, *, layerwise=False):
        return self.bug.many(super().get_many(keys, layerwise=layerwise))

    def put(self, kv):
        self.entries[self.bug.key(kv.key)] = self.bug.put(kv)
        return True

    def delete(self, key):
        return (key in self.entries) if self.bug.sticky else self.entries.pop(self.bug.key(key), None) is not None

    def __contains__(self, key):
        return self.bug.key(key) in self.entries

    def keys(self):
        return iter(self.entries)

    def pin(self, key):
        return self.bug.pins


def _half(kv):
    return replace(kv, layers=tuple((k.bfloat16().to(k.dtype), v.bfloat16().to(v.dtype)) for k, v in kv.layers))


def _add_zero(kv):
    return replace(kv, layers=tuple((k + 0, v + 0) for k, v in kv.layers))


def _swap(kv):
    return replace(kv, layers=tuple((v, k) for k, v in kv.layers))


@pytest.mark.parametrize(
    ("name", "spoils"),
    [
        ("test_what_is_put_comes_back", {"spoil_put": _half}),
        ("test_what_is_put_comes_back", {"spoil_put": _swap}),
        ("test_what_is_put_comes_back", {"spoil_put": lambda kv: replace(kv, prelude=())}),
        ("test_every_bit_comes_back", {"spoil_put": _add_zero}),
        ("test_what_the_caller_does_later_stays_outside", {}),
        ("test_a_view_is_stored_alone", {}),
        ("test_retention_comes_back", {"spoil_put": lambda kv: replace(kv, retention=Retention())}),
        ("test_any_text_is_a_key", {"spoil_key": str.lower}),
        ("test_deleting_while_keys_are_read", {}),
        ("test_get_many_answers_in_order", {"get_many": lambda found: sorted(found, key=lambda kv: kv is None)}),
        ("test_get_many_answers_in_order", {"get_many": lambda found: [kv for kv in found if kv is not None]}),
        ("test_layerwise_equals_get", {"get_many": lambda found: [kv and _swap(kv) for kv in found]}),
        ("test_put_many_answers_in_order", {}),
        ("test_stats_count", {}),
        ("test_the_limit_holds", {}),
        ("test_too_large_is_refused_and_costs_nothing", {}),
        ("test_pinned_entries_stay", {"pins": True}),
        ("test_no_room_beside_what_is_pinned", {"pins": True}),
        ("test_like_a_dict", {"spoil_get": lambda kv: None}),
    ],
)
def test_the_suite_finds_a_broken_store(name, spoils):
    suite = type("T", (StoreTests,), {"make": lambda self, limit=1 << 30: Broken(limit, **spoils)})
    with pytest.raises((AssertionError, RuntimeError)):  # a dict says itself that it changed under its reader
        getattr(suite(), name)()


def test_the_suite_finds_a_late_read_of_another_entry():
    class Late(MemoryStore):
        def get_many(self, keys, *, layerwise=False):
            if not layerwise:
                return super().get_many(keys)
            return [kv and kv.with_layers(_Now(self, kv)) for kv in super().get_many(keys)]

    class _Now(tuple):
        def __new__(cls, store, kv):
            self = super().__new__(cls, kv.layers)
            self.store, self.key, self.old = store, kv.key, kv
            return self

        def __iter__(self):
            return iter((self.store.get(self.key) or self.old).layers)

    suite = type("T", (StoreTests,), {"make": lambda self, limit=1 << 30: Late(limit)})
    with pytest.raises(AssertionError, match="not those of the entry"):
        suite().test_layers_of_an_entry_that_left()


@pytest.mark.parametrize(
    "spoils",
    [
        {"spoil_get": lambda kv: None},
        {"spoil_put": _half},
        {"spoil_put": lambda kv: replace(kv, length=9)},
        {"spoil_key": str.lower},
        {"get_many": lambda found: found[::-1]},
        {"pins": True},
        {"sticky": True},
    ],
    ids=["forgets", "rounds", "length", "capitals", "order", "pins", "deletes nothing"],
)
def test_the_state_machine_finds_a_broken_store(spoils):
    machine = store_machine(lambda: Broken(1 << 30, **spoils))
    # No cutting down to the shortest run: that something fails is all there is to see.
    seek = settings(QUICK, max_examples=200, phases=(Phase.generate,), derandomize=True)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=seek)


def test_the_state_machine_finds_a_pin_that_does_not_hold():
    class Loose(MemoryStore):
        def pin(self, key):
            return key in self

    seek = settings(QUICK, max_examples=300, phases=(Phase.generate,), derandomize=True)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(store_machine(lambda: Loose(2 * SIZE), forgets=True), settings=seek)


def test_same_kv_sees_the_sign_of_zero():
    kv = tiny_kv("a")
    zero = replace(kv, layers=tuple((k * 0, v * 0) for k, v in kv.layers))
    minus = replace(kv, layers=tuple((-(k * 0).abs(), v * 0) for k, v in kv.layers))
    assert same_kv(zero, zero)
    assert not same_kv(minus, zero)
    assert not same_kv(None, kv)
