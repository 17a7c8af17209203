"""The Redis store on real redis-server processes: conformance, restarts, expiry, limits."""

from __future__ import annotations

import logging
import signal
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from blend.chunk import ChunkKV
from blend.errors import BudgetError, CorruptEntry, StoreError, StoreUnavailable
from blend.stores.codecs import Plain
from blend.stores.entry import pack
from blend.stores.redis_store import RedisStore
from blend.testing.store_machine import store_machine
from blend.testing.stores import StoreTests, same_kv, tiny_kv
from tests.servers import RedisServer, free_port

LONG = settings(max_examples=15, stateful_step_count=40, deadline=None)


class Clock:
    """A clock that stands until it is told to go on."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def server(tmp_path):
    """A server of the test's own, that it may stop."""
    with RedisServer(tmp_path) as server:
        yield server


def fresh(server, **options):
    return RedisStore(server.url, namespace=uuid.uuid4().hex, **options)


def stored(kv):
    return pack(kv, Plain()).nbytes


class TestRedisStore(StoreTests):
    @pytest.fixture(autouse=True)
    def _server(self, redis_server):
        self.server = redis_server

    def make(self, limit=1 << 30):
        return fresh(self.server, limit=limit)

    def entry_size(self, kv):
        return stored(kv)


class TestSplitLayers(TestRedisStore):
    def make(self, limit=1 << 30):
        return fresh(self.server, limit=limit, part_bytes=40)


class TestCodec(TestRedisStore):
    lossless = False
    limited = False  # here an entry is mostly head: the suite's large ones are hardly larger

    def make(self, limit=1 << 30):
        return fresh(self.server, codec="int8")


def test_like_a_dict_for_long(redis_server):
    machine = store_machine(lambda: fresh(redis_server))
    run_state_machine_as_test(machine, settings=LONG)


def test_like_a_forgetful_dict_under_a_limit(redis_server):
    machine = store_machine(lambda: fresh(redis_server, limit=3 * stored(tiny_kv("a"))), forgets=True)
    run_state_machine_as_test(machine, settings=LONG)


# --- the server comes and goes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_stops_and_comes_back(server, how, caplog):
    caplog.set_level(logging.INFO, "kvblend")
    clock = Clock()
    store = fresh(server, clock=clock)
    kvs = [tiny_kv(key, seed=seed) for seed, key in enumerate("abc")]
    assert store.put_many(kvs) == [True] * 3
    server.stop(how)
    assert store.get("a") is None
    assert store.stats.failures == 1, "a call that nobody answered"
    for _ in range(5):
        assert store.get_many(["a", "b"]) == [None, None]
        assert not store.put(kvs[0])
        assert not store.delete("a")
        assert "a" not in store
        assert list(store.keys()) == []
    assert store.stats.failures == 1, "the server was asked again though it had just not answered"
    server.start()
    assert store.get("a") is None, "still within the pause"
    clock.now += 1.0
    assert store.get("a") is None, "nothing was saved; but the server is asked again"
    assert store.put_many(kvs) == [True] * 3
    assert all(same_kv(found, kv) for found, kv in zip(store.get_many("abc"), kvs, strict=True))
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"], "one notice per outage, one after"


def test_what_the_server_saved_is_hit_again(tmp_path):
    with RedisServer(tmp_path, "--appendonly", "yes", "--appendfsync", "always") as server:
        clock = Clock()
        store = fresh(server, clock=clock, limit=1 << 20)
        store.put(tiny_kv("a"))
        server.stop(signal.SIGKILL)
        assert store.get("a") is None
        server.start()
        clock.now += 1.0
        assert same_kv(store.get("a"), tiny_kv("a"))


def test_a_quick_restart_between_two_calls_is_not_noticed(server):
    store = fresh(server)
    store.put(tiny_kv("a"))
    server.stop()
    server.start()
    assert store.put(tiny_kv("a")), "the connection in hand is dead, a new one is not"
    assert same_kv(store.get("a"), tiny_kv("a"))
    assert store.stats.failures == 0


def test_the_pause_doubles_up_to_its_longest(server):
    clock = Clock()
    store = fresh(server, clock=clock)
    server.stop()
    store.get("a")
    for pause in (1, 2, 4, 8, 16, 30, 30):
        before = store.stats.failures
        clock.now += pause - 0.01
        store.get("a")
        assert store.stats.failures == before, f"asked before {pause} s were over"
        clock.now += 0.01
        store.get("a")
        assert store.stats.failures == before + 1, f"not asked though {pause} s were over"
    server.start()
    clock.now += 30
    assert store.put(tiny_kv("a"))
    server.stop()
    store.get("a")
    clock.now += 1
    before = store.stats.failures
    store.get("a")
    assert store.stats.failures == before + 1, "after an answer the pauses begin anew"
    server.start()


def test_a_server_that_hangs_is_left_after_the_timeout(server):
    import redis

    store = fresh(server, client=redis.Redis(port=server.port, socket_timeout=0.1, retry=None))
    store.put(tiny_kv("a"))
    server.stop(signal.SIGSTOP)
    try:
        assert store.get("a") is None
        assert store.stats.failures == 1
        assert store.get("a") is None
        assert store.stats.failures == 1
    finally:
        server.process.send_signal(signal.SIGCONT)


def test_threads_while_the_server_restarts(server):
    """Whatever happens, an answer is right or a miss."""
    clock = Clock()
    store = fresh(server, clock=clock)

    def work(worker):
        for step in range(60):
            number = (worker * 7 + step) % 20
            store.put(tiny_kv(str(number), seed=number))
            found = store.get(str(number))
            assert found is None or same_kv(found, tiny_kv(str(number), seed=number))
            clock.now += 0.3

    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(work, worker) for worker in range(4)]
        for _ in range(2):
            server.stop(signal.SIGKILL)
            server.start()
        for job in jobs:
            job.result()
    clock.now += 60
    assert store.put(tiny_kv("0"))
    assert same_kv(store.get("0"), tiny_kv("0"))


def test_a_layer_that_cannot_be_read_any_more(server):
    store = fresh(server)
    store.ahead_bytes = 1  # each layer alone
    store.put(tiny_kv("a"))
    (lazy,) = store.get_many(["a"], layerwise=True)
    lazy.layers[0]
    server.stop()
    with pytest.raises(CorruptEntry, match="layer 1 of entry a cannot be read"):
        lazy.layers[1]
    server.start()


# --- opening ----------------------------------------------------------------------------------------------------------


def test_nobody_there():
    url = f"redis://:hush@127.0.0.1:{free_port()}/0"
    with pytest.raises(StoreUnavailable, match="start one there") as raised:
        RedisStore(url)
    assert "hush" not in str(raised.value)


def test_a_password(tmp_path):
    with RedisServer(tmp_path, "--requirepass", "s3cret") as server:
        store = fresh(server)
        store.put(tiny_kv("a"))
        assert same_kv(store.get("a"), tiny_kv("a"))
        assert "s3cret" not in store.name
        with pytest.raises(StoreUnavailable, match="refuses") as raised:
            RedisStore(server.url.replace("s3cret", "wrong"))
        assert "wrong@" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"namespace": "a*"}, "letters, digits"),
        ({"ttl": 0}, "ttl is 0"),
        ({"limit": 0}, "limit is 0"),
        ({"part_bytes": 0}, "part_bytes is 0"),
        ({"codec": "mp3"}, "no codec 'mp3'"),
    ],
)
def test_arguments_that_cannot_be(redis_server, options, message):
    with pytest.raises((StoreError, BudgetError), match=message):
        RedisStore(redis_server.url, **options)


def test_an_address_that_is_none():
    with pytest.raises(StoreError, match="no address of a Redis server"):
        RedisStore("http://127.0.0.1")


def test_a_client_that_decodes_is_refused(redis_server):
    import redis

    with pytest.raises(StoreError, match="decode_responses=False"):
        RedisStore(redis_server.url, client=redis.Redis(port=redis_server.port, decode_responses=True))


# --- what the server drops, and what others do ------------------------------------------------------------------------


def test_entries_expire(redis_server):
    store = fresh(redis_server, ttl=3600, limit=3 * stored(tiny_kv("x")))
    for key in "abc":
        store.put(tiny_kv(key))
    client = redis_server.client()
    assert 3500 < client.ttl(store._entry + "a") <= 3600
    client.pexpire(store._entry + "a", 0)  # its time is over
    assert store.get("a") is None
    assert sorted(store.keys()) == ["b", "c"]
    store.put(tiny_kv("d"))
    assert sorted(store.keys()) == ["b", "c", "d"], "an entry left though the expired one had made room"
    assert store.stats.evicted == 0


def test_an_expired_entry_that_nobody_asks_for_is_forgotten(redis_server):
    store = fresh(redis_server, ttl=3600)
    client = redis_server.client()
    for index in range(20):
        store.put(tiny_kv(str(index)))
        client.pexpire(f"{store._entry}{index}", 0)
    assert client.zcard(store._books[0]) <= 1
    assert int(client.hget(store._books[2], "bytes")) <= 2 * stored(tiny_kv("x"))


def test_a_server_that_evicts_by_itself(tmp_path):
    """Whole entries leave, at the server's choice; what is found is right."""
    with RedisServer(tmp_path, "--maxmemory", "6mb", "--maxmemory-policy", "allkeys-lru") as server:
        store = fresh(server, part_bytes=1000)
        kvs = [wide_kv(str(index), index) for index in range(30)]
        for kv in kvs:
            assert store.put(kv)
        found = [store.get(kv.key) for kv in kvs]
        assert 0 < sum(kv is not None for kv in found) < 30
        assert all(one is None or same_kv(one, kv) for one, kv in zip(found, kvs, strict=True))


def test_a_server_without_memory_refuses(tmp_path):
    with RedisServer(tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "noeviction") as server:
        store = fresh(server)
        answers = [store.put(wide_kv(str(index), index)) for index in range(20)]
        assert answers[0]
        assert not answers[-1]
        assert store.stats.refused == answers.count(False)
        assert store.stats.failures == 0
        assert store.get("0") is not None, "it still answers"


def test_a_read_only_server_is_still_read(redis_server):
    store = fresh(redis_server)
    store.put(tiny_kv("a"))
    client = redis_server.client()
    client.config_set("min-replicas-to-write", 1)
    try:
        assert not store.put(tiny_kv("b"))
        assert store.stats.failures == 1
        assert same_kv(store.get("a"), tiny_kv("a"))
    finally:
        client.config_set("min-replicas-to-write", 0)


@pytest.mark.parametrize("field", ["0.0", "1.2", "head"])
def test_a_part_that_is_missing(redis_server, field):
    store = fresh(redis_server, part_bytes=100)
    store.put(tiny_kv("a"))
    client = redis_server.client()
    assert client.hdel(store._entry + "a", field) == 1
    assert store.get("a") is None
    if field != "head":  # without its head an entry is none
        assert "a" not in store
        assert store.stats.corrupt == 1
    assert store.put(tiny_kv("a"))
    assert same_kv(store.get("a"), tiny_kv("a"))


@pytest.mark.parametrize("field", ["0.0", "1.0", "head"])
@pytest.mark.parametrize("layerwise", [False, True])
def test_flipped_and_cut_bytes(redis_server, field, layerwise):
    client = redis_server.client()
    store = fresh(redis_server)
    for spoil in (lambda data: data[:-1], lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:], lambda data: b""):
        store.put(tiny_kv("a"))
        before = store.stats.corrupt
        client.hset(store._entry + "a", field, spoil(client.hget(store._entry + "a", field)))
        try:
            (found,) = store.get_many(["a"], layerwise=layerwise)
            assert found is None or list(found.layers) is None
        except CorruptEntry:
            assert layerwise
        assert store.stats.corrupt == before + 1
        assert "a" not in store


def test_another_entry_under_the_key(redis_server):
    store = fresh(redis_server)
    store.put(tiny_kv("a"))
    client = redis_server.client()
    client.copy(store._entry + "a", store._entry + "b")
    assert store.get("b") is None
    assert store.stats.foreign == 1
    assert sorted(store.keys()) == ["a"]


def test_a_key_that_another_program_wrote(redis_server):
    store = fresh(redis_server)
    client = redis_server.client()
    client.set(store._entry + "a", "no entry at all")
    assert store.get_many(["b", "a"]) == [None, None]
    assert store.stats.corrupt == 1
    assert "a" not in store
    client.set(store._entry + "a", "nor this")
    assert store.put(tiny_kv("a")), "it is replaced"
    assert same_kv(store.get("a"), tiny_kv("a"))


def test_an_entry_replaced_in_mid_read_is_read_anew(redis_server):
    store = fresh(redis_server)
    store.put(tiny_kv("a", seed=1))
    head = store._heads(["a"])[0]
    store.put(tiny_kv("a", seed=2))
    assert same_kv(store._whole(head), tiny_kv("a", seed=2))
    assert store.stats.corrupt == 0
    assert "a" in store


# --- several clients --------------------------------------------------------------------------------------------------


def test_two_clients_share_entries_and_one_limit(redis_server):
    size = stored(tiny_kv("x"))
    one = fresh(redis_server, limit=3 * size)
    two = RedisStore(redis_server.url, namespace=one._entry.split(":")[0], limit=3 * size, part_bytes=50)
    one.put(tiny_kv("a", seed=1))
    two.put(tiny_kv("b", seed=2))
    one.put(tiny_kv("c", seed=3))
    assert same_kv(two.get("a"), tiny_kv("a", seed=1)), "a use by one client counts for all"
    assert same_kv(one.get("b"), tiny_kv("b", seed=2)), "written with another part size"
    one.get("a")
    two.put(tiny_kv("d", seed=4))
    assert sorted(one.keys()) == ["a", "b", "d"]
    assert two.stats.evicted == 1


def test_namespaces_do_not_see_each_other(redis_server):
    one, two = fresh(redis_server), fresh(redis_server)
    one.put(tiny_kv("a"))
    assert two.get("a") is None
    assert list(two.keys()) == []


def test_a_client_of_the_callers_stays_open(redis_server):
    client = redis_server.client()
    with fresh(redis_server, client=client) as store:
        store.put(tiny_kv("a"))
    assert client.ping()


def wide_kv(key, seed):
    """About 0.4 MB in two layers."""
    generator = torch.Generator().manual_seed(seed)
    layers = tuple(tuple(torch.randn(2, 128, 200, generator=generator) for _ in range(2)) for _ in range(2))
    return ChunkKV(key, "model", tuple(range(128)), (), 128, layers)
