"""A store against a plain dict: long random runs of every verb, cut down by Hypothesis to the shortest that fails.

::

    def test_my_store():
        run_state_machine_as_test(store_machine(MyStore))

Needs ``hypothesis``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from blend.chunk import ChunkKV
from blend.errors import CorruptEntry
from blend.stores.base import Store
from blend.testing.kv import same_kv, tiny_kv

__all__ = ["store_machine"]

KEYS = st.sampled_from(["a", "b", "c", "d", "e", "0123456789abcdef", "A", "a/b", "ü"])
SEEDS = st.integers(0, 99)
ROWS = st.integers(1, 6)


def store_machine(
    make: Callable[[], Store],
    *,
    reopen: Callable[[Store], Store] | None = None,
    forgets: bool = False,
    same: Callable[[ChunkKV | None, ChunkKV], bool] = same_kv,
) -> type[RuleBasedStateMachine]:
    """The state machine of one kind of store.

    Args:
        make: an empty store of its own for each run.
        reopen: opens a closed store's contents again; None where nothing outlives it.
        forgets: the store's limit is small: it may refuse and evict. Then an entry may be gone, but never wrong, and
            never while it is pinned.
        same: whether the first may come out after the second was put.
    """

    class Machine(RuleBasedStateMachine):
        """Every rule does the same to the store and to a dict."""

        def __init__(self) -> None:
            super().__init__()
            self.truth: dict[str, ChunkKV] = {}
            self.pins: dict[str, int] = {}

        @initialize()
        def start(self) -> None:
            self.store = make()

        @rule(key=KEYS, seed=SEEDS, rows=ROWS)
        def put(self, key: str, seed: int, rows: int) -> None:
            kv = tiny_kv(key, seed, rows)
            self._kept(kv, self.store.put(kv))

        @rule(keys=st.lists(KEYS, max_size=4), seed=SEEDS, rows=ROWS)
        def put_many(self, keys: list[str], seed: int, rows: int) -> None:
            kvs = [tiny_kv(key, seed + i, rows) for i, key in enumerate(keys)]
            answers = self.store.put_many(kvs)
            assert len(answers) == len(kvs)
            for kv, kept in zip(kvs, answers, strict=True):
                self._kept(kv, kept)

        @rule(key=KEYS)
        def get(self, key: str) -> None:
            self._right(key, self.store.get(key))

        @rule(keys=st.lists(KEYS, max_size=4), layerwise=st.booleans())
        def get_many(self, keys: list[str], layerwise: bool) -> None:
            found = self.store.get_many(keys, layerwise=layerwise)
            assert len(found) == len(keys)
            for key, kv in zip(keys, found, strict=True):
                self._right(key, kv)

        @rule(key=KEYS, seed=SEEDS)
        def replace_under_a_reader(self, key: str, seed: int) -> None:
            (lazy,) = self.store.get_many([key], layerwise=True)
            old = self.truth.get(key)
            kv = tiny_kv(key, seed)
            self._kept(kv, self.store.put(kv))
            if lazy is not None and old is not None:
                with suppress(CorruptEntry):
                    assert same(lazy, old), f"a late read of {key!r} is not what was asked for"

        @rule(key=KEYS)
        def delete(self, key: str) -> None:
            known = self.truth.pop(key, None) is not None
            gone = self.store.delete(key)
            assert gone == known or (forgets and known), f"delete({key!r}) says {gone}"
            self.pins.pop(key, None)

        @rule(key=KEYS)
        def contains(self, key: str) -> None:
            assert (key in self.store) == (self.store.get(key) is not None)
            self._right(key, self.store.get(key))

        @rule(key=KEYS)
        def pin(self, key: str) -> None:
            if self.store.pin(key):
                assert key in self.truth, f"{key!r} was pinned and is not there"
                self.pins[key] = self.pins.get(key, 0) + 1

        @rule(key=KEYS)
        def unpin(self, key: str) -> None:
            assert self.store.unpin(key) == (key in self.pins), f"pins of {key!r}: {self.pins.get(key, 0)}"
            if key in self.pins:
                self.pins[key] -= 1
                if not self.pins[key]:
                    del self.pins[key]

        @rule()
        def close_and_open(self) -> None:
            if reopen is not None:
                self.store.close()
                self.store = reopen(self.store)
                self.pins.clear()

        @invariant()
        def keys_agree(self) -> None:
            if not hasattr(self, "store"):
                return
            keys = list(self.store.keys())
            assert len(keys) == len(set(keys)), f"a key stands twice in {keys}"
            assert set(keys) <= set(self.truth), f"{set(keys) - set(self.truth)} was never put"
            must = set(self.pins) if forgets else set(self.truth)
            assert must <= set(keys), f"{must - set(keys)} is gone"

        def teardown(self) -> None:
            if hasattr(self, "store"):
                self.store.close()

        def _kept(self, kv: ChunkKV, kept: bool) -> None:
            assert kept or forgets, f"{kv.key!r} was refused, and there is room"
            if kept:
                self.truth[kv.key] = kv

        def _right(self, key: str, found: ChunkKV | None) -> None:
            truth = self.truth.get(key)
            if found is None:
                assert truth is None or (forgets and key not in self.pins), f"{key!r} is gone"
            else:
                assert truth is not None, f"{key!r} is there and was never put, or deleted"
                assert same(found, truth), f"under {key!r} lies something else"

    return Machine
