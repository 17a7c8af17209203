"""The conformance suite of stores: what goes in comes out, bit for bit, or it is a miss.

::

    class TestMyStore(StoreTests):
        def make(self, limit=1 << 30):
            return MyStore(limit)

Any test runner that collects ``test_`` methods will do. Beside it stands a state machine that draws long random runs:
:mod:`blend.testing.store_machine`.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar

import torch

from blend.chunk import ChunkKV, Retention
from blend.errors import CorruptEntry
from blend.stores.base import Store
from blend.testing.kv import close_kv, same_bits, same_kv, tiny_kv

__all__ = ["StoreTests", "close_kv", "same_kv", "tiny_kv"]


class StoreTests:
    """Tests of one store.

    Attributes:
        lossless: what comes out is what went in, to the last bit; False for a store with a lossy codec.
        tolerance: largest error of a lossy store, relative to the largest number of a layer.
        limited: the store keeps a limit of bytes itself, and knows at once what does not fit.
    """

    lossless: ClassVar[bool] = True
    tolerance: ClassVar[float] = 0.1
    limited: ClassVar[bool] = True

    def make(self, limit: int = 1 << 30) -> Store:
        """An empty store that holds ``limit`` bytes."""
        raise NotImplementedError("a subclass says how its store is made")

    def entry_size(self, kv: ChunkKV) -> int:
        """Bytes that the store counts for an entry."""
        return kv.nbytes

    def same(self, found: ChunkKV | None, truth: ChunkKV) -> bool:
        """Whether ``found`` is what a get may give after ``truth`` was put."""
        return same_kv(found, truth) if self.lossless else close_kv(found, truth, self.tolerance)

    # --- round trip -------------------------------------------------------------------------------

    def test_what_is_put_comes_back(self) -> None:
        store = self.make()
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            kv = tiny_kv(str(dtype), dtype=dtype)
            assert store.put(kv), "a put that fits is kept"
            assert self.same(store.get(kv.key), kv), f"{dtype} did not come back as it was"

    def test_every_bit_comes_back(self) -> None:
        """Signed zeros, infinities, NaN and subnormal numbers included."""
        if not self.lossless:
            return
        odd = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, -1e-40, 3.4e38]
        for dtype in (torch.float32, torch.bfloat16):
            row = torch.tensor(odd, dtype=torch.float32).to(dtype).reshape(1, 1, -1)
            kv = ChunkKV("odd", "model", (5,), (), 1, ((row, -row),))
            store = self.make()
            store.put(kv)
            assert self.same(store.get("odd"), kv), f"an odd {dtype} number changed"

    def test_layers_of_different_shapes_come_back(self) -> None:
        """As in models with two head dims, or compressed latents."""
        layers = ((torch.randn(1, 7, 32), torch.randn(1, 7, 8)), (torch.randn(4, 7, 16), torch.randn(4, 7, 64)))
        kv = ChunkKV("shapes", "model", tuple(range(7)), (1, 2), 9, layers)
        store = self.make()
        store.put(kv)
        assert self.same(store.get("shapes"), kv)

    def test_what_the_caller_does_later_stays_outside(self) -> None:
        kv = tiny_kv("a")
        truth = tiny_kv("a")
        store = self.make()
        store.put(kv)
        for keys, values in kv.layers:
            keys.zero_()
            values.fill_(7)
        assert self.same(store.get("a"), truth), "the store shares memory with the caller's tensors"

    def test_a_view_is_stored_alone(self) -> None:
        """A chunk cut out of a batch does not keep the batch."""
        batch = torch.randn(8, 2, 100, 4)
        kv = ChunkKV("cut", "model", tuple(range(5)), (), 100, ((batch[3, :, 10:15], batch[5, :, 20:25]),))
        store = self.make()
        store.put(kv)
        found = store.get("cut")
        assert found is not None
        assert self.same(found, kv)
        storages = (x.untyped_storage() for pair in found.layers for x in pair)
        held = sum({x.data_ptr(): x.nbytes() for x in storages}.values())
        assert held < 2 * kv.nbytes, f"{held} bytes are held for {kv.nbytes} bytes of KV"

    def test_retention_comes_back(self) -> None:
        kv = replace(tiny_kv("a"), retention=Retention(cost=0.25, priority=80, duration=3600.0))
        store = self.make()
        store.put(kv)
        found = store.get("a")
        assert found is not None
        assert found.retention == kv.retention, f"{found.retention} instead of {kv.retention}"

    def test_any_text_is_a_key(self) -> None:
        odd = [
            "a/b",
            "../up",
            ".",
            "..",
            "",
            " ",
            "a b",
            "A",
            "a",
            "%41",
            "ä",
            "漢",
            "x" * 300,
            "nul\0",
            "new\nline",
            "*",
        ]
        store = self.make()
        for seed, key in enumerate(odd):
            assert store.put(tiny_kv(key, seed=seed)), f"{key!r} was refused"
        for seed, key in enumerate(odd):
            assert self.same(store.get(key), tiny_kv(key, seed=seed)), f"under {key!r} lies something else"
        assert sorted(store.keys()) == sorted(odd)

    # --- the verbs --------------------------------------------------------------------------------

    def test_absent_is_a_miss(self) -> None:
        store = self.make()
        assert store.get("nowhere") is None
        assert "nowhere" not in store
        assert not store.delete("nowhere")
        assert list(store.keys()) == []

    def test_contains_keys_and_delete(self) -> None:
        store = self.make()
        for key in "abc":
            store.put(tiny_kv(key))
        assert sorted(store.keys()) == ["a", "b", "c"]
        assert "b" in store
        assert store.delete("b"), "there was an entry to delete"
        assert "b" not in store
        assert store.get("b") is None
        assert not store.delete("b"), "there was nothing left to delete"
        assert sorted(store.keys()) == ["a", "c"]

    def test_the_newest_put_wins(self) -> None:
        store = self.make()
        store.put(tiny_kv("a", seed=1))
        store.put(tiny_kv("a", seed=2, rows=9))
        assert self.same(store.get("a"), tiny_kv("a", seed=2, rows=9))
        assert list(store.keys()) == ["a"]

    def test_deleting_while_keys_are_read(self) -> None:
        store = self.make()
        for key in "abc":
            store.put(tiny_kv(key))
        for key in store.keys():  # noqa: SIM118  # a store is no dict
            store.delete(key)
        assert list(store.keys()) == []

    def test_like_a_dict(self) -> None:
        """A long random run of all verbs."""
        store, truth, draw = self.make(), dict[str, ChunkKV](), random.Random(0)
        for step in range(300):
            key = draw.choice("abcdefgh")
            verb = draw.choice(("put", "get", "delete", "contains"))
            if verb == "put":
                truth[key] = tiny_kv(key, seed=step, rows=draw.randint(1, 6))
                assert store.put(truth[key])
            elif verb == "delete":
                assert store.delete(key) == (truth.pop(key, None) is not None)
            elif verb == "contains":
                assert (key in store) == (key in truth)
            else:
                found = store.get(key)
                assert found is None if key not in truth else self.same(found, truth[key]), f"{key} at step {step}"
            assert sorted(store.keys()) == sorted(truth)

    # --- many at once, layer by layer -------------------------------------------------------------

    def test_get_many_answers_in_order(self) -> None:
        store = self.make()
        for seed, key in enumerate("abc"):
            store.put(tiny_kv(key, seed=seed))
        truth = {key: tiny_kv(key, seed=seed) for seed, key in enumerate("abc")}
        wanted = ["b", "nowhere", "a", "c", "nor here", "b"]
        for layerwise in (False, True):
            found = store.get_many(wanted, layerwise=layerwise)
            assert len(found) == len(wanted), f"{len(found)} answers for {len(wanted)} keys"
            for key, kv in zip(wanted, found, strict=True):
                assert kv is None if key not in truth else self.same(kv, truth[key]), f"{key!r}, layerwise={layerwise}"
        assert store.get_many([]) == []

    def test_layerwise_equals_get(self) -> None:
        store = self.make()
        store.put(tiny_kv("a"))
        whole, (lazy,) = store.get("a"), store.get_many(["a"], layerwise=True)
        assert whole is not None
        assert lazy is not None
        assert same_kv(lazy, whole), "all layers"
        assert len(lazy.layers) == 2
        for index in (1, 0, -1, 1):  # in any order, and twice
            assert all(map(same_bits, lazy.layers[index], whole.layers[index])), f"layer {index}"
        assert len(lazy.layers[:1]) == 1

    def test_layers_of_an_entry_that_left(self) -> None:
        """A late read gives the old layer, or says that it is gone; never the layer of what was put since."""
        old, new = tiny_kv("a", seed=1), tiny_kv("a", seed=2)
        for replaced in (False, True):
            store = self.make()
            store.put(old)
            (lazy,) = store.get_many(["a"], layerwise=True)
            assert lazy is not None
            store.put(new) if replaced else store.delete("a")
            with suppress(CorruptEntry):
                assert self.same(lazy, old), "the layers are not those of the entry that was asked for"
            assert self.same(store.get("a"), new) if replaced else store.get("a") is None

    def test_put_many_answers_in_order(self) -> None:
        store = self.make(limit=3 * self.entry_size(tiny_kv("x")))
        kvs = [tiny_kv("a", seed=1), tiny_kv("big", rows=400), tiny_kv("c", seed=3)]
        answers = store.put_many(kvs)
        assert answers == [True, not self.limited, True], f"{answers}"
        assert self.same(store.get("a"), kvs[0])
        assert self.same(store.get("c"), kvs[2])
        assert store.put_many([]) == []

    # --- what it tells ----------------------------------------------------------------------------

    def test_stats_count(self) -> None:
        store = self.make()
        store.put(tiny_kv("a"))
        store.put(tiny_kv("b"))
        store.get("a")
        store.get("nowhere")
        store.get_many(["a", "nowhere", "b"])
        store.get_many(["b", "nowhere"], layerwise=True)
        stats = store.stats
        assert (stats.hits, stats.misses) == (4, 3), f"{stats}"
        assert (stats.corrupt, stats.foreign, stats.failures, stats.refused) == (0, 0, 0, 0), f"{stats}"
        assert stats.bytes_read > 0
        assert stats.read_seconds >= 0
        assert sorted(store.keys()) == ["a", "b"] and "a" in store  # noqa: PT018
        assert (stats.hits, stats.misses) == (4, 3), "looking is not asking"

    def test_closing_twice_is_harmless(self) -> None:
        store = self.make()
        store.put(tiny_kv("a"))
        store.close()
        store.close()
        with self.make() as store:
            store.put(tiny_kv("a"))
            store.close()

    # --- limits, pins and threads -----------------------------------------------------------------

    def test_the_limit_holds(self) -> None:
        if not self.limited:
            return
        size = self.entry_size(tiny_kv("x"))
        store = self.make(limit=3 * size)
        for index in range(10):
            assert store.put(tiny_kv(str(index), seed=index))
            entries = [store.get(key) for key in store.keys()]  # noqa: SIM118  # a store is no dict
            assert sum(self.entry_size(kv) for kv in entries if kv is not None) <= 3 * size
            assert self.same(store.get(str(index)), tiny_kv(str(index), seed=index)), "the newest entry is there"
        assert len(list(store.keys())) == 3, "entries were dropped that fit"

    def test_too_large_is_refused_and_costs_nothing(self) -> None:
        if not self.limited:
            return
        size = self.entry_size(tiny_kv("x"))
        store = self.make(limit=2 * size)
        store.put(tiny_kv("a"))
        store.put(tiny_kv("b"))
        assert not store.put(tiny_kv("big", rows=400)), "an entry beyond the limit cannot be kept"
        assert "big" not in store
        assert sorted(store.keys()) == ["a", "b"], "other entries were dropped for one that never fits"
        assert store.stats.refused == 1

    def test_pinned_entries_stay(self) -> None:
        """Where a store cannot pin, it says so."""
        store = self.make(limit=3 * self.entry_size(tiny_kv("x")))
        store.put(tiny_kv("a"))
        assert not store.pin("nowhere")
        assert not store.unpin("a"), "there was no pin to take off"
        if not store.pin("a"):
            return
        assert store.pin("a"), "pins add up"
        for key in "bcdefg":
            assert store.put(tiny_kv(key)), "there is room beside what is pinned"
        assert self.same(store.get("a"), tiny_kv("a")), "a pinned entry left"
        assert len(list(store.keys())) == 3
        assert store.unpin("a")
        for key in "hijklm":
            store.put(tiny_kv(key))
        assert "a" in store, "one of two pins is left"
        assert store.unpin("a")
        assert not store.unpin("a")
        for key in "nopqrs":
            store.put(tiny_kv(key))
        assert "a" not in store, "an entry stayed that nothing holds"

    def test_no_room_beside_what_is_pinned(self) -> None:
        store = self.make(limit=3 * self.entry_size(tiny_kv("x")))
        for key in "abc":
            store.put(tiny_kv(key))
        if not store.pin("a"):
            return
        assert store.pin("b")
        assert not store.put(tiny_kv("d", rows=12)), "it fits into the limit, but not beside what is pinned"
        assert sorted(store.keys()) == ["a", "b", "c"], "an entry was dropped for one that has no room"
        assert store.put(tiny_kv("a", seed=5)), "a pinned entry can be replaced"
        assert self.same(store.get("a"), tiny_kv("a", seed=5))
        assert store.put(tiny_kv("d"))
        assert sorted(store.keys()) == ["a", "b", "d"]
        assert store.delete("b"), "a pin does not keep an entry from being deleted"
        assert "b" not in store

    def test_threads_share_it(self) -> None:
        store = self.make(limit=40 * self.entry_size(tiny_kv("x")))

        def work(worker: int) -> None:
            draw = random.Random(worker)
            for _ in range(150):
                number = draw.randrange(60)
                key = str(number)
                match draw.randrange(4):
                    case 0:
                        store.put(tiny_kv(key, seed=number))
                    case 1:
                        found = store.get(key)
                        assert found is None or self.same(found, tiny_kv(key, seed=number)), (
                            "a torn entry was handed out"
                        )
                    case 2:
                        (found,) = store.get_many([key], layerwise=True)
                        with suppress(CorruptEntry):  # it may leave meanwhile
                            assert found is None or self.same(found, tiny_kv(key, seed=number)), "a torn layer"
                    case _:
                        store.delete(key)

        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(work, worker) for worker in range(8)]:
                done.result()
        assert all(key in store for key in store.keys())  # noqa: SIM118  # a store is no dict
