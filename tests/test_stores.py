"""Stores against their conformance suite."""

from __future__ import annotations

from dataclasses import replace

import pytest

from blend import BudgetError, MemoryStore
from blend.stores import Store
from blend.testing.stores import StoreTests, same_kv, tiny_kv


class TestMemoryStore(StoreTests):
    def make(self, limit=1 << 30):
        return MemoryStore(limit)


def test_the_longest_unused_entry_goes_first():
    store = MemoryStore(3 * tiny_kv("x").nbytes)
    for key in "abc":
        store.put(tiny_kv(key))
    store.get("a")
    store.put(tiny_kv("d"))
    assert sorted(store.keys()) == ["a", "c", "d"]
    assert store.evicted == 1
    assert store.nbytes == 3 * tiny_kv("x").nbytes


@pytest.mark.parametrize("limit", [0, -1])
def test_a_store_without_room_is_refused(limit):
    with pytest.raises(BudgetError, match="positive"):
        MemoryStore(limit)


class Broken(Store):
    """A dict, and a hook for a bug."""

    def __init__(self, limit, spoil_put=lambda kv: kv, spoil_get=lambda kv: kv):
        self.entries, self.limit, self.spoil_put, self.spoil_get = {}, limit, spoil_put, spoil_get

    def get(self, key):
        return self.spoil_get(self.entries.get(key))

    def put(self, kv):
        self.entries[kv.key] = self.spoil_put(kv)
        return True

    def delete(self, key):
        return self.entries.pop(key, None) is not None

    def __contains__(self, key):
        return key in self.entries

    def keys(self):
        return iter(self.entries)


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
        ("test_deleting_while_keys_are_read", {}),
        ("test_the_limit_holds", {}),
        ("test_too_large_is_refused_and_costs_nothing", {}),
        ("test_like_a_dict", {"spoil_get": lambda kv: None}),
    ],
)
def test_the_suite_finds_a_broken_store(name, spoils):
    suite = type("T", (StoreTests,), {"make": lambda self, limit=1 << 30: Broken(limit, **spoils)})
    with pytest.raises((AssertionError, RuntimeError)):  # a dict says itself that it changed under its reader
        getattr(suite(), name)()


def test_same_kv_sees_the_sign_of_zero():
    kv = tiny_kv("a")
    zero = replace(kv, layers=tuple((k * 0, v * 0) for k, v in kv.layers))
    minus = replace(kv, layers=tuple((-(k * 0).abs(), v * 0) for k, v in kv.layers))
    assert same_kv(zero, zero)
    assert not same_kv(minus, zero)
    assert not same_kv(None, kv)
