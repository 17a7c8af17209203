"""The conformance suite of stores: what goes in comes out, bit for bit, or it is a miss.

::

    class TestMyStore(StoreTests):
        def make(self, limit=1 << 30):
            return MyStore(limit)

Any test runner that collects ``test_`` methods will do.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from blend.chunk import ChunkKV
from blend.stores.base import Store

__all__ = ["StoreTests", "same_kv", "tiny_kv"]


class StoreTests:
    """Tests of one store."""

    def make(self, limit: int = 1 << 30) -> Store:
        """An empty store that holds ``limit`` bytes of KV."""
        raise NotImplementedError("a subclass says how its store is made")

    # --- round trip -------------------------------------------------------------------------------

    def test_what_is_put_comes_back(self) -> None:
        store = self.make()
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            kv = tiny_kv(str(dtype), dtype=dtype)
            assert store.put(kv), "a put that fits is kept"
            assert same_kv(store.get(kv.key), kv), f"{dtype} did not come back as it was"

    def test_every_bit_comes_back(self) -> None:
        """Signed zeros, infinities, NaN and subnormal numbers included."""
        odd = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, -1e-40, 3.4e38]
        for dtype in (torch.float32, torch.bfloat16):
            row = torch.tensor(odd, dtype=torch.float32).to(dtype).reshape(1, 1, -1)
            kv = ChunkKV("odd", "model", (5,), (), 1, ((row, -row),))
            store = self.make()
            store.put(kv)
            assert same_kv(store.get("odd"), kv), f"an odd {dtype} number changed"

    def test_layers_of_different_shapes_come_back(self) -> None:
        """As in models with two head dims, or compressed latents."""
        layers = ((torch.randn(1, 7, 32), torch.randn(1, 7, 8)), (torch.randn(4, 7, 16), torch.randn(4, 7, 64)))
        kv = ChunkKV("shapes", "model", tuple(range(7)), (1, 2), 9, layers)
        store = self.make()
        store.put(kv)
        assert same_kv(store.get("shapes"), kv)

    def test_what_the_caller_does_later_stays_outside(self) -> None:
        kv = tiny_kv("a")
        truth = tiny_kv("a")
        store = self.make()
        store.put(kv)
        for keys, values in kv.layers:
            keys.zero_()
            values.fill_(7)
        assert same_kv(store.get("a"), truth), "the store shares memory with the caller's tensors"

    def test_a_view_is_stored_alone(self) -> None:
        """A chunk cut out of a batch does not keep the batch."""
        batch = torch.randn(8, 2, 100, 4)
        kv = ChunkKV("cut", "model", tuple(range(5)), (), 100, ((batch[3, :, 10:15], batch[5, :, 20:25]),))
        store = self.make()
        store.put(kv)
        found = store.get("cut")
        assert found is not None
        assert same_kv(found, kv)
        held = sum(x.untyped_storage().nbytes() for pair in found.layers for x in pair)
        assert held == kv.nbytes, f"{held} bytes are held for {kv.nbytes} bytes of KV"

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
        assert same_kv(store.get("a"), tiny_kv("a", seed=2, rows=9))
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
                assert found is None if key not in truth else same_kv(found, truth[key]), f"{key} at step {step}"
            assert sorted(store.keys()) == sorted(truth)

    # --- limits and threads -----------------------------------------------------------------------

    def test_the_limit_holds(self) -> None:
        size = tiny_kv("x").nbytes
        store = self.make(limit=3 * size)
        for index in range(10):
            assert store.put(tiny_kv(str(index), seed=index))
            entries = [store.get(key) for key in store.keys()]  # noqa: SIM118  # a store is no dict
            assert sum(kv.nbytes for kv in entries if kv is not None) <= 3 * size
            assert same_kv(store.get(str(index)), tiny_kv(str(index), seed=index)), "the newest entry is there"
        assert len(list(store.keys())) == 3, "entries were dropped that fit"

    def test_too_large_is_refused_and_costs_nothing(self) -> None:
        size = tiny_kv("x").nbytes
        store = self.make(limit=2 * size)
        store.put(tiny_kv("a"))
        store.put(tiny_kv("b"))
        assert not store.put(tiny_kv("big", rows=50)), "an entry beyond the limit cannot be kept"
        assert "big" not in store
        assert sorted(store.keys()) == ["a", "b"], "other entries were dropped for one that never fits"

    def test_threads_share_it(self) -> None:
        store = self.make(limit=40 * tiny_kv("x").nbytes)

        def work(worker: int) -> None:
            draw = random.Random(worker)
            for _ in range(150):
                number = draw.randrange(60)
                key = str(number)
                match draw.randrange(3):
                    case 0:
                        store.put(tiny_kv(key, seed=number))
                    case 1:
                        found = store.get(key)
                        assert found is None or same_kv(found, tiny_kv(key, seed=number)), "a torn entry was handed out"
                    case _:
                        store.delete(key)

        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(work, worker) for worker in range(8)]:
                done.result()
        assert all(key in store for key in store.keys())  # noqa: SIM118  # a store is no dict


def tiny_kv(key: str, seed: int = 0, rows: int = 4, dtype: torch.dtype = torch.float32) -> ChunkKV:
    """Random KV of two small layers."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.randn(2, rows, 4, generator=generator).to(dtype)

    return ChunkKV(key, "model", tuple(range(rows)), (1, seed), rows + 2, ((draw(), draw()), (draw(), draw())))


def same_kv(a: ChunkKV | None, b: ChunkKV) -> bool:
    """Whether both are the same to the last bit, dtype, shape and ids included."""
    if a is None or (a.key, a.fingerprint, a.ids, a.prelude, a.length) != (
        b.key, b.fingerprint, b.ids, b.prelude, b.length
    ):  # fmt: skip
        return False
    pairs = [(x, y) for one, other in zip(a.layers, b.layers, strict=True) for x, y in zip(one, other, strict=True)]
    return all(x.dtype == y.dtype and x.shape == y.shape and torch.equal(_bits(x), _bits(y)) for x, y in pairs)


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)
