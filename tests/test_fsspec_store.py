"""The fsspec store on local files, in memory, and on S3 as moto's server speaks it."""

from __future__ import annotations

import logging
import uuid

import boto3
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from blend.chunk import ChunkKV
from blend.errors import BudgetError, CorruptEntry, StoreError, StoreUnavailable
from blend.stores.codecs import Plain
from blend.stores.entry import pack
from blend.stores.fsspec_store import FsspecStore
from blend.testing.store_machine import store_machine
from blend.testing.stores import StoreTests, same_kv, tiny_kv
from tests.servers import free_port

LONG = settings(max_examples=5, stateful_step_count=20, deadline=None)


def stored(kv):
    return pack(kv, Plain()).nbytes


@pytest.fixture(scope="module")
def bucket(s3_server):
    name = f"kv-{uuid.uuid4().hex[:12]}"
    client = boto3.client("s3", endpoint_url=s3_server.url)
    client.create_bucket(Bucket=name)
    yield name
    client.close()


@pytest.fixture(params=["local", "s3"])
def make(request, tmp_path):
    """Makes a store in a place of its own; ``at`` opens the same place again."""
    if request.param == "local":
        base, options = f"local://{tmp_path}", {}
    else:
        bucket = request.getfixturevalue("bucket")
        base, options = f"s3://{bucket}", {"endpoint_url": request.getfixturevalue("s3_server").url}

    def make(at=None, **more):
        return FsspecStore(f"{base}/{at or uuid.uuid4().hex}", **options, **more)

    return make


class TestLocalFiles(StoreTests):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.folder = tmp_path

    def make(self, limit=1 << 30):
        return FsspecStore(f"local://{self.folder}/{uuid.uuid4().hex}", limit=limit)

    def entry_size(self, kv):
        return stored(kv)


class TestInMemory(StoreTests):
    def make(self, limit=1 << 30):
        return FsspecStore(f"memory://{uuid.uuid4().hex}", limit=limit)

    def entry_size(self, kv):
        return stored(kv)


class TestS3(StoreTests):
    @pytest.fixture(autouse=True)
    def _bucket(self, s3_server, bucket):
        self.url, self.bucket = s3_server.url, bucket

    def make(self, limit=1 << 30):
        return FsspecStore(f"s3://{self.bucket}/{uuid.uuid4().hex}", limit=limit, endpoint_url=self.url)

    def entry_size(self, kv):
        return stored(kv)

    # Each has some hundred calls, at 5 to 10 ms.
    test_threads_share_it = pytest.mark.slow(StoreTests.test_threads_share_it)
    test_like_a_dict = pytest.mark.slow(StoreTests.test_like_a_dict)


def test_like_a_dict_for_long(make):
    run_state_machine_as_test(store_machine(make), settings=LONG)


def test_like_a_forgetful_dict_under_a_limit(make):
    machine = store_machine(lambda: make(limit=3 * stored(tiny_kv("a"))), forgets=True)
    run_state_machine_as_test(machine, settings=LONG)


# --- the server comes and goes ----------------------------------------------------------------------------------------


def test_a_server_that_stops_and_comes_back(s3_server, bucket, caplog):
    caplog.set_level(logging.INFO, "kvblend")
    now = [0.0]
    url = f"s3://{bucket}/{uuid.uuid4().hex}"
    store = FsspecStore(url, clock=lambda: now[0], endpoint_url=s3_server.url)
    kvs = [tiny_kv(key, seed=seed) for seed, key in enumerate("abc")]
    assert store.put_many(kvs) == [True] * 3
    (lazy,) = store.get_many(["a"], layerwise=True)
    s3_server.stop()
    try:
        with pytest.raises(CorruptEntry, match="cannot be read"):
            lazy.layers[0]
        assert store.stats.failures == 1
        for _ in range(3):
            assert store.get_many("ab") == [None, None]
            assert not store.put(kvs[0])
            assert not store.delete("a")
            assert "a" not in store
            assert list(store.keys()) == []
        assert store.stats.failures == 1
    finally:
        s3_server.start()
    now[0] += 1.0
    assert all(same_kv(found, kv) for found, kv in zip(store.get_many("abc"), kvs, strict=True))
    assert same_kv(lazy, kvs[0]), "the layers can be read again"
    assert [record.levelname for record in caplog.records if record.name == "kvblend"] == ["WARNING", "INFO"]


def test_nobody_there(s3_server):
    with pytest.raises(StoreUnavailable, match="the credentials and the endpoint"):
        FsspecStore("s3://bucket/kv", endpoint_url=f"http://127.0.0.1:{free_port()}")


def test_no_such_bucket(s3_server):
    with pytest.raises(StoreUnavailable, match=r"s3://nowhere/kv cannot be used \(FileNotFoundError"):
        FsspecStore("s3://nowhere/kv", endpoint_url=s3_server.url)


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("gopher://x/kv", {}, "gopher"),
        ("s3://x/kv", {"endpont_url": "http://127.0.0.1"}, "endpont_url"),
        ("memory://x", {"limit": 0}, "limit is 0"),
        ("memory://x", {"codec": "mp3"}, "no codec 'mp3'"),
    ],
)
def test_arguments_that_cannot_be(url, options, message):
    with pytest.raises((StoreError, BudgetError), match=message):
        FsspecStore(url, **options)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreUnavailable, match="see that it is there"):
        FsspecStore(f"local://{tmp_path}/file/kv")


def test_a_place_that_may_only_be_read(make, monkeypatch):
    """As with credentials that may not write: no reason to stop reading."""

    def forbidden(*args, **kwargs):
        raise PermissionError("Access Denied")

    store = make()
    store.put(tiny_kv("a"))
    monkeypatch.setattr(store._fs, "pipe_file", forbidden)
    assert not store.put(tiny_kv("b"))
    assert store.stats.failures == 1
    assert same_kv(store.get("a"), tiny_kv("a"))


# --- damage -----------------------------------------------------------------------------------------------------------


def raw(store, key):
    return store._fs.cat_file(store._path(key))


def overwrite(store, key, data):
    store._fs.pipe_file(store._path(key), data)


@pytest.mark.parametrize("layerwise", [False, True])
def test_flipped_bytes(make, layerwise):
    store = make()
    store.put(tiny_kv("a"))
    whole = raw(store, "a")
    places = [0, 3, 9, len(whole) // 2, len(whole) - 600, len(whole) - 1]
    for count, at in enumerate(places, 1):
        overwrite(store, "a", whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        try:
            (found,) = store.get_many(["a"], layerwise=layerwise)
            assert found is None or list(found.layers) is None, f"a flipped byte at {at} was not seen"
        except CorruptEntry:
            assert layerwise
        assert store.stats.corrupt == count, f"byte {at}"
        assert "a" not in store
    assert store.stats.failures == 0


def test_every_length_that_is_too_short(make):
    store = make()
    store.put(tiny_kv("a"))
    whole = raw(store, "a")
    for count, length in enumerate((0, 1, 7, 8, 100, len(whole) - 520, len(whole) - 512, len(whole) - 1), 1):
        overwrite(store, "a", whole[:length])
        assert store.get("a") is None, f"cut off at {length}"
        assert store.stats.corrupt == count
        assert "a" not in store
    assert store.stats.failures == 0


def test_a_foreign_object(make):
    store = make()
    store.put(tiny_kv("a"))
    overwrite(store, "b", raw(store, "a"))
    assert store.get("b") is None
    assert store.stats.foreign == 1
    assert list(store.keys()) == ["a"]


def test_an_entry_replaced_in_mid_read_is_read_anew(make):
    store = make()
    store.put(tiny_kv("a", seed=1))
    head = store._heads(["a"])[0]
    store.put(tiny_kv("a", seed=2))
    assert same_kv(store._whole(head), tiny_kv("a", seed=2))
    assert store.stats.corrupt == 0


def test_a_head_larger_than_the_guess(make):
    layers = tuple((torch.full((1, 2, 4), float(i)), torch.full((1, 2, 4), -float(i))) for i in range(300))
    kv = ChunkKV("deep", "model", tuple(range(2000)), (), 2000, layers)
    store = make()
    store.put(kv)
    assert same_kv(store.get("deep"), kv)
    whole = raw(store, "deep")
    for count, spoiled in enumerate((b"\xff" * 4, b"\x00" * 8), 1):
        overwrite(store, "deep", whole[:40_000] + spoiled + whole[40_000 + len(spoiled) :])
        assert store.get("deep") is None
        assert (store.stats.corrupt, store.stats.failures) == (count, 0)
        assert "deep" not in store


def test_a_large_entry_in_several_ranges(make, monkeypatch):
    monkeypatch.setattr("blend.stores.fsspec_store._RANGE", 1000)
    monkeypatch.setattr(FsspecStore, "ahead_bytes", 700)
    store = make()
    kv = tiny_kv("a", rows=40)
    store.put(kv)
    assert same_kv(store.get("a"), kv)
    (lazy,) = store.get_many(["a"], layerwise=True)
    assert same_kv(lazy, kv)


# --- others, and limits -----------------------------------------------------------------------------------------------


def test_two_stores_on_one_place(make):
    one, two = make(at="shared"), make(at="shared")
    one.put(tiny_kv("a"))
    assert same_kv(two.get("a"), tiny_kv("a"))
    assert list(two.keys()) == ["a"]
    assert two.delete("a")
    assert "a" not in one
    assert one.get("a") is None


def test_a_limit_counts_what_was_there_before(make):
    size = stored(tiny_kv("x"))
    first = make(at="kept")
    for key in "abc":
        first.put(tiny_kv(key))
    store = make(at="kept", limit=3 * size)
    store.put(tiny_kv("d"))
    assert len(list(store.keys())) == 3
    assert "d" in store
    assert store.stats.evicted == 1


def test_what_is_not_an_entry_is_left_alone(make):
    store = make(limit=10 * stored(tiny_kv("x")))
    store._fs.pipe_file(f"{store._root}/notes.txt", b"mine")
    store.put(tiny_kv("a"))
    assert list(store.keys()) == ["a"]


def test_an_interrupted_put_leaves_nothing(tmp_path, monkeypatch):
    store = FsspecStore(f"local://{tmp_path}/kv")
    monkeypatch.setattr(store._fs, "mv", lambda *paths: (_ for _ in ()).throw(OSError("disk full")))
    assert not store.put(tiny_kv("a"))
    assert store.stats.failures == 1
    assert list((tmp_path / "kv").iterdir()) == []


def test_an_object_is_a_safetensors_file(tmp_path):
    from safetensors import safe_open

    store = FsspecStore(f"local://{tmp_path}")
    store.put(tiny_kv("a"))
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("001.value"), tiny_kv("a").layers[1][1])
