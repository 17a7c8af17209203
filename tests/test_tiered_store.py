"""Tiers: conformance, promotion, nothing lost on the way down, and tiers that fail."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from blend.errors import CorruptEntry, StoreError
from blend.stores.disk import DiskStore
from blend.stores.memory import MemoryStore
from blend.stores.redis_store import RedisStore
from blend.stores.tiered import TieredStore
from blend.testing.store_machine import store_machine
from blend.testing.stores import StoreTests, same_kv, tiny_kv
from tests.servers import RedisServer

SIZE = tiny_kv("x").nbytes
LONG = settings(max_examples=15, stateful_step_count=40, deadline=None)


class Gate(MemoryStore):
    """A store whose puts wait for a gate, and that can be told to raise, or to say no."""

    def __init__(self, limit=1 << 30):
        super().__init__(limit)
        self.open = threading.Event()
        self.open.set()
        self.waiting = threading.Event()
        self.error = None
        self.deaf = False

    def put(self, kv):
        self.waiting.set()
        assert self.open.wait(60)
        self._fail()
        return not self.deaf and super().put(kv)

    def get_many(self, keys, *, layerwise=False):
        self._fail()
        return super().get_many(keys, layerwise=layerwise)

    def delete(self, key):
        self._fail()
        return not self.deaf and super().delete(key)

    def keys(self):
        self._fail()
        return super().keys()

    def __contains__(self, key):
        self._fail()
        return super().__contains__(key)

    def _fail(self):
        if self.error is not None:
            raise self.error


@pytest.fixture
def gate():
    """A lower tier; its gate is open in the end, so that no writer waits for ever."""
    gate = Gate()
    yield gate
    gate.open.set()


class TieredTests(StoreTests):
    limited = False  # each tier keeps a limit of its own
    # A pin holds in the tiers that can; the entries of the others come and go.
    test_pinned_entries_stay = None
    test_no_room_beside_what_is_pinned = None


class TestMemoryOverRedis(TieredTests):
    @pytest.fixture(autouse=True)
    def _server(self, redis_server):
        self.server = redis_server

    def make(self, limit=1 << 30):
        below = RedisStore(self.server.url, namespace=uuid.uuid4().hex, limit=max(limit, 1 << 20))
        return TieredStore([MemoryStore(3 * SIZE), below])


class TestMemoryOverDiskWrittenThrough(TieredTests):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.folder = tmp_path

    def make(self, limit=1 << 30):
        below = DiskStore(self.folder / uuid.uuid4().hex, max(limit, 1 << 20), sync=False)
        return TieredStore([MemoryStore(3 * SIZE), below], write="through")


class TestOneTier(StoreTests):
    """Behaves as the store alone, limits and pins included."""

    def make(self, limit=1 << 30):
        return TieredStore([MemoryStore(limit)])


class TestTiersOfTiers(TieredTests):
    def make(self, limit=1 << 30):
        return TieredStore([TieredStore([MemoryStore(SIZE), MemoryStore(3 * SIZE)]), MemoryStore(1 << 30)])


class NoPins(MemoryStore):
    def pin(self, key):
        return False

    def unpin(self, key):
        return False


@pytest.mark.parametrize("write", ["back", "through"])
def test_like_a_dict_for_long(tmp_path, write):
    """Nothing is lost though the first tier holds two entries, and everything is there after closing and opening."""

    def open_at(folder):
        store = TieredStore([NoPins(2 * SIZE), NoPins(4 * SIZE), DiskStore(folder, sync=False)], write=write)
        store.folder = folder
        return store

    machine = store_machine(lambda: open_at(tmp_path / uuid.uuid4().hex), reopen=lambda store: open_at(store.folder))
    run_state_machine_as_test(machine, settings=LONG)


# --- down -------------------------------------------------------------------------------------------------------------


def test_nothing_is_lost_between_eviction_and_writing(gate):
    gate.open.clear()
    store = TieredStore([MemoryStore(2 * SIZE), gate])
    kvs = [tiny_kv(str(seed), seed=seed) for seed in range(20)]
    assert store.put_many(kvs) == [True] * 20
    assert all(same_kv(found, kv) for found, kv in zip(store.get_many([kv.key for kv in kvs]), kvs, strict=True))
    assert sorted(store.keys()) == sorted(kv.key for kv in kvs)
    assert all(kv.key in store for kv in kvs)
    gate.open.set()
    store.flush()
    assert len(list(gate.keys())) == 20
    assert len(list(store.tiers[0].keys())) == 2
    assert all(same_kv(store.get(kv.key), kv) for kv in kvs)


def test_a_put_waits_for_room_in_the_queue(gate):
    gate.open.clear()
    store = TieredStore([MemoryStore(), gate], queue_bytes=2 * SIZE)
    store.put(tiny_kv("a"))
    store.put(tiny_kv("b"))
    done = threading.Event()
    thread = threading.Thread(target=lambda: (store.put(tiny_kv("c")), done.set()))
    thread.start()
    assert not done.wait(0.05), "three entries were queued where two fit"
    gate.open.set()
    thread.join()
    store.flush()
    assert sorted(gate.keys()) == ["a", "b", "c"]


def test_an_entry_larger_than_the_queue_goes_through_it(gate):
    store = TieredStore([MemoryStore(), gate], queue_bytes=1)
    assert store.put_many([tiny_kv("a"), tiny_kv("b")]) == [True, True]
    store.flush()
    assert sorted(gate.keys()) == ["a", "b"]


def test_what_the_first_tier_refuses_is_written_below_in_the_request(gate):
    big = tiny_kv("big", rows=50)
    store = TieredStore([MemoryStore(2 * SIZE), gate])
    store.put(tiny_kv("big"))
    assert store.put(big)
    assert "big" in gate
    assert same_kv(store.get("big"), big), "not the older, smaller one"
    assert store.stats.refused == 0


def test_what_every_tier_refuses_is_refused():
    store = TieredStore([MemoryStore(SIZE), MemoryStore(2 * SIZE)])
    assert not store.put(tiny_kv("big", rows=50))
    assert "big" not in store
    assert store.stats.refused == 1


@pytest.mark.parametrize("write", ["back", "through"])
def test_a_tier_that_refuses_an_entry_drops_the_older_one(write):
    small, large = MemoryStore(SIZE), MemoryStore()
    store = TieredStore([MemoryStore(8 * SIZE), small, large], write=write)
    store.put(tiny_kv("a"))
    store.flush()
    assert "a" in small
    big = tiny_kv("a", seed=1, rows=6)
    assert store.put(big)
    store.flush()
    store.tiers[0].delete("a")
    assert same_kv(store.get("a"), big), "the older one, out of the tier that the new one is too large for"


def test_pinned_entries_leave_no_room_and_the_older_one_is_dropped():
    small, large = MemoryStore(2 * SIZE), MemoryStore()
    store = TieredStore([NoPins(8 * SIZE), small, large])
    store.put_many([tiny_kv("a"), tiny_kv("b")])
    store.flush()
    assert store.pin("b")
    store.put(big := tiny_kv("a", seed=1, rows=6))
    store.flush()
    store.tiers[0].delete("a")
    assert same_kv(store.get("a"), big)


def test_a_promotion_that_is_refused_leaves_nothing_older():
    small, large = MemoryStore(SIZE), MemoryStore()
    store = TieredStore([MemoryStore(8 * SIZE), small, large])
    large.put(big := tiny_kv("a", rows=6))
    assert same_kv(store.get("a"), big)
    store.flush()
    assert "a" not in small
    assert "a" in store.tiers[0]


@pytest.mark.parametrize("position", ["in the queue", "being written"])
def test_deleted_on_its_way_down(gate, position):
    gate.open.clear()
    store = TieredStore([MemoryStore(), gate])
    if position == "in the queue":
        store.put(tiny_kv("before"))
    store.put(tiny_kv("a"))
    assert gate.waiting.wait(60)
    if position == "being written":
        threading.Timer(0.05, gate.open.set).start()
    assert store.delete("a")
    gate.open.set()
    store.flush()
    assert "a" not in store
    assert "a" not in gate


def test_replaced_while_it_is_written(gate):
    gate.open.clear()
    store = TieredStore([MemoryStore(), gate])
    store.put(tiny_kv("a", seed=1))
    assert gate.waiting.wait(60)
    store.put(tiny_kv("a", seed=2))
    store.put(tiny_kv("a", seed=3))
    gate.open.set()
    store.flush()
    assert same_kv(gate.get("a"), tiny_kv("a", seed=3))


def test_closing_writes_what_waits(gate):
    gate.open.clear()
    with TieredStore([MemoryStore(), gate]) as store:
        store.put_many([tiny_kv(key) for key in "abc"])
        threading.Timer(0.05, gate.open.set).start()
    assert sorted(gate.keys()) == ["a", "b", "c"]
    assert not [thread for thread in threading.enumerate() if thread.name == "kvblend-writer"]


def test_a_store_that_nobody_holds_any_more_writes_what_waits(gate):
    gate.open.clear()
    store = TieredStore([MemoryStore(), gate])
    store.put_many([tiny_kv(key) for key in "abc"])
    threading.Timer(0.05, gate.open.set).start()
    del store
    gc.collect()
    assert sorted(gate.keys()) == ["a", "b", "c"]


def test_the_end_of_the_process_writes_what_waits(tmp_path, redis_server):
    """Without a close()."""
    namespace = uuid.uuid4().hex
    code = f"""
from blend.stores.disk import DiskStore
from blend.stores.memory import MemoryStore
from blend.stores.redis_store import RedisStore
from blend.stores.tiered import TieredStore
from blend.testing.stores import tiny_kv
below = DiskStore({str(tmp_path / "kv")!r}), RedisStore({redis_server.url!r}, namespace={namespace!r})
store = TieredStore([MemoryStore(), *below])
for index in range(50):
    store.put(tiny_kv(str(index), seed=index))
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)
    for found in (DiskStore(tmp_path / "kv"), RedisStore(redis_server.url, namespace=namespace)):
        assert sorted(found.keys()) == sorted(map(str, range(50)))
        assert same_kv(found.get("49"), tiny_kv("49", seed=49))


# --- up ---------------------------------------------------------------------------------------------------------------


def test_a_hit_below_is_promoted_to_every_tier_above():
    tiers = [MemoryStore(), MemoryStore(), MemoryStore()]
    tiers[2].put(tiny_kv("a"))
    store = TieredStore(tiers)
    assert same_kv(store.get("a"), tiny_kv("a"))
    store.flush()
    assert all("a" in tier for tier in tiers)
    assert [tier.stats.hits for tier in tiers] == [0, 0, 1]
    store.get("a")
    assert [stats.hits for stats in store.tier_stats] == [1, 0, 1]
    assert (store.stats.hits, store.stats.misses) == (2, 0)


def test_a_promotion_does_not_wait(gate):
    below = MemoryStore()
    below.put(tiny_kv("a"))
    gate.open.clear()
    store = TieredStore([MemoryStore(), gate, below], queue_bytes=SIZE)
    store.put(tiny_kv("b"))
    assert same_kv(store.get("a"), tiny_kv("a")), "the queue is full, and nobody waits for it"
    gate.open.set()
    store.flush()
    assert sorted(gate.keys()) == ["b"]


def test_layers_come_one_by_one_and_then_the_entry_is_promoted():
    above, below = MemoryStore(), MemoryStore()
    below.put(tiny_kv("a"))
    store = TieredStore([above, below])
    (lazy,) = store.get_many(["a"], layerwise=True)
    lazy.layers[1]
    assert "a" not in above
    lazy.layers[1]
    assert "a" not in above, "one layer is missing"
    lazy.layers[0]
    assert same_kv(above.get("a"), tiny_kv("a"))
    assert same_kv(lazy, tiny_kv("a"))


def test_an_entry_replaced_under_a_reader_does_not_wait_for_the_tiers_between(gate):
    """What waits for the writer is taken for the newest there is."""
    below = MemoryStore()
    below.put(tiny_kv("a", seed=1))
    store = TieredStore([MemoryStore(SIZE), gate, below])
    (lazy,) = store.get_many(["a"], layerwise=True)
    store.put(tiny_kv("a", seed=2))
    store.flush()
    gate.open.clear()
    store.put(tiny_kv("b"))  # "a" leaves the first tier, and the writer is busy
    assert same_kv(lazy, tiny_kv("a", seed=1))
    assert same_kv(store.get("a"), tiny_kv("a", seed=2))
    gate.open.set()


def test_what_is_read_while_it_is_deleted_does_not_come_back():
    class Between(MemoryStore):
        def delete(self, key):
            known = super().delete(key)
            list(lazy.layers)  # the last layer arrives: the entry would be promoted
            store.flush()
            return known

    below = MemoryStore()
    below.put(tiny_kv("a"))
    store = TieredStore([MemoryStore(), Between(), below])
    (lazy,) = store.get_many(["a"], layerwise=True)
    assert store.delete("a")
    assert store.get("a") is None


@pytest.mark.parametrize("change", ["put", "delete"])
def test_what_changed_since_it_was_read_is_not_promoted(change):
    below = MemoryStore()
    below.put(tiny_kv("a", seed=1))
    store = TieredStore([MemoryStore(), MemoryStore(), below])
    (lazy,) = store.get_many(["a"], layerwise=True)
    lazy.layers[0]
    store.put(tiny_kv("a", seed=2)) if change == "put" else store.delete("a")
    lazy.layers[1]
    store.flush()
    assert same_kv(store.get("a"), tiny_kv("a", seed=2)) if change == "put" else store.get("a") is None


def test_a_damaged_layer_is_told_and_not_promoted(tmp_path, redis_server):
    below = RedisStore(redis_server.url, namespace=uuid.uuid4().hex)
    below.put(tiny_kv("a"))
    store = TieredStore([MemoryStore(), below])
    (lazy,) = store.get_many(["a"], layerwise=True)
    redis_server.client().hset(below._entry + "a", "1.0", b"junk")
    with pytest.raises(CorruptEntry):
        list(lazy.layers)
    assert store.get("a") is None
    assert store.stats.corrupt == 1


# --- tiers that fail --------------------------------------------------------------------------------------------------


def test_a_tier_that_raises_is_a_miss_and_counted(gate):
    now = [0.0]
    store = TieredStore([MemoryStore(2 * SIZE), gate], clock=lambda: now[0])
    store.put_many([tiny_kv(key) for key in "abc"])
    store.flush()
    gate.error = OSError("the disk is gone")
    assert store.get_many("abc") == [None, store.tiers[0].get("b"), store.tiers[0].get("c")]
    assert store.stats.failures == 1
    assert sorted(store.keys()) == ["b", "c"]
    assert "a" not in store
    assert store.put(tiny_kv("d"))
    assert store.delete("c")
    store.flush()
    assert store.stats.failures == 1, "it is left alone for a moment"
    now[0] += 1.0
    assert store.get("a") is None
    assert store.stats.failures == 2
    gate.error = None
    now[0] += 2.0
    assert same_kv(store.get("a"), tiny_kv("a")), "it is asked again"


@pytest.mark.parametrize("fails", ["raises", "says no"])
def test_a_tier_that_missed_an_entry_does_not_give_back_the_older_one(gate, fails):
    """A tier that was down could not even be told to drop it. Stores on a server say no where others raise."""
    now = [0.0]
    store = TieredStore([MemoryStore(), gate], clock=lambda: now[0])
    store.put_many([tiny_kv("a", seed=1), tiny_kv("b")])
    store.flush()
    gate.error = OSError("the disk is gone") if fails == "raises" else None
    gate.deaf = fails == "says no"
    store.put(tiny_kv("a", seed=2))
    store.flush()
    gate.error, gate.deaf = None, False
    now[0] += 1.0
    store.tiers[0].delete("a")
    assert same_kv(gate.get("a"), tiny_kv("a", seed=1))
    assert store.get("a") is None
    assert "a" not in store
    assert list(store.keys()) == ["b"]
    assert not store.pin("a")
    assert not store.delete("a")
    assert "a" not in gate
    store.put(tiny_kv("a", seed=3))
    store.flush()
    store.tiers[0].delete("a")
    assert same_kv(store.get("a"), tiny_kv("a", seed=3)), "it has taken a newer one"


def test_a_first_tier_that_raises(gate):
    gate.error = MemoryError("none left")
    store = TieredStore([gate, MemoryStore()])
    assert store.put(tiny_kv("a"))
    assert same_kv(store.get("a"), tiny_kv("a"))


def test_a_redis_below_that_stops_and_comes_back(tmp_path):
    now = [0.0]
    with RedisServer(tmp_path) as server:
        store = TieredStore([MemoryStore(2 * SIZE), RedisStore(server.url, clock=lambda: now[0])])
        store.put_many([tiny_kv(key) for key in "abc"])
        store.flush()
        server.stop()
        assert store.get("a") is None
        assert same_kv(store.get("c"), tiny_kv("c")), "memory still answers"
        assert store.put(tiny_kv("d"))
        store.flush()
        assert store.stats.failures == 1
        server.start()
        now[0] += 1.0
        store.put_many([tiny_kv(key) for key in "abc"])
        store.flush()
        assert all(same_kv(store.get(key), tiny_kv(key)) for key in "abc")
        store.close()


def test_every_tier_is_closed_though_one_raises():
    closed = []

    class Closing(MemoryStore):
        def close(self):
            closed.append(self)
            raise OSError("cannot close")

    store = TieredStore([Closing(), Closing()])
    store.close()
    assert len(closed) == 2


# --- codecs, pins, arguments ------------------------------------------------------------------------------------------


class Coded(MemoryStore):
    def __init__(self, codec):
        super().__init__()
        self.codec = codec


@pytest.mark.parametrize(
    ("codecs", "common"),
    [
        (("none", "none"), "none"),
        (("none", "zstd"), "none"),
        (("none", "int8"), "int8"),
        (("int8", "zstd", "int8"), "int8"),
        (("int4", "int4+zstd"), "int4"),
    ],
)
def test_the_codec_is_what_loses_digits(codecs, common):
    assert TieredStore([Coded(codec) for codec in codecs]).codec == common


@pytest.mark.parametrize("write", ["back", "through"])
def test_an_entry_does_not_change_with_the_tier_it_comes_from(tmp_path, write):
    kv = tiny_kv("a", rows=9)
    upper = MemoryStore()
    store = TieredStore([upper, DiskStore(tmp_path, codec="int8")], write=write)
    store.put(kv)
    first = store.get("a")
    assert not same_kv(first, kv), "int8 has lost nothing"
    store.flush()
    upper.delete("a")
    assert same_kv(store.get("a"), first), "from below"
    assert same_kv(upper.get("a"), first), "promoted"
    store.close()


def test_two_lossy_codecs_are_refused():
    with pytest.raises(StoreError, match="int4, int8"):
        TieredStore([Coded("int8"), Coded("int4")])


def test_pins_hold_where_they_can():
    store = TieredStore([MemoryStore(2 * SIZE), MemoryStore()])
    store.put(tiny_kv("a"))
    assert store.pin("a")
    for key in "bcde":
        store.put(tiny_kv(key))
    assert "a" in store.tiers[0]
    assert store.unpin("a")
    assert not store.unpin("a")
    assert not store.pin("nowhere")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tiers": []}, "at least one store"),
        ({"tiers": [MemoryStore()], "write": "behind"}, "'back', 'through'"),
        ({"tiers": [MemoryStore()], "queue_bytes": 0}, "queue_bytes is 0"),
    ],
)
def test_arguments_that_cannot_be(arguments, message):
    with pytest.raises(StoreError, match=message):
        TieredStore(**arguments)
