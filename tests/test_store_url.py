"""Stores by address: what each part of one does, and what every mistake is told."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import boto3
import pytest

from blend.errors import StoreError, StoreUnavailable
from blend.stores.disk import DiskStore
from blend.stores.fsspec_store import FsspecStore
from blend.stores.memory import MemoryStore
from blend.stores.redis_store import RedisStore
from blend.stores.tiered import TieredStore
from blend.stores.url import open_store, parse_size
from blend.testing.stores import same_kv, tiny_kv
from tests.servers import RedisServer, free_port


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    """Relative paths and the home folder lead into the test's own folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("1048576", 1 << 20),
        ("512MiB", 512 << 20),
        ("8GiB", 8 << 30),
        ("10GB", 10**10),
        ("1.5 GiB", 3 << 29),
        ("2tib", 2 << 40),
        ("3kb", 3000),
        ("7B", 7),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "8 gigs", "GiB", "1e9", "8G", "0.1B", "inf", "1..5GiB"])
def test_what_is_no_size(text):
    with pytest.raises(StoreError, match=r"is no size: .*8GiB"):
        parse_size(text)


# --- kinds ------------------------------------------------------------------------------------------------------------


def test_memory():
    store = open_store("memory://8GiB?policy=lru&codec=none")
    assert isinstance(store, MemoryStore)
    assert store.limit == 8 << 30
    assert open_store("memory://").limit == MemoryStore().limit


@pytest.mark.parametrize("policy", ["gdsf", "hotness"])
def test_a_policy(policy):
    assert open_store(f"memory://1MiB?policy={policy}")._queue.policy.name == policy
    assert open_store(f"file://kv?policy={policy}")._policy.name == policy


@pytest.mark.parametrize(
    ("spec", "folder"),
    [
        ("file://relative/kv", "relative/kv"),
        ("relative/kv", "relative/kv"),
        ("~/kv", "home/kv"),
        ("file://~/kv", "home/kv"),
        ("file://with%20a%20space", "with a space"),
        ("file://with+plus", "with+plus"),
        ("kv?limit=1GiB", "kv"),
        (Path("a/path"), "a/path"),
        (Path("a|b"), "a|b"),
    ],
)
def test_folders(tmp_path, spec, folder):
    store = open_store(spec)
    assert isinstance(store, DiskStore)
    assert Path(store.folder) == tmp_path / folder
    store.put(tiny_kv("a"))
    assert same_kv(store.get("a"), tiny_kv("a"))
    assert (tmp_path / folder).is_dir()


def test_a_folder_with_options(tmp_path):
    store = open_store(f"file://{tmp_path}/kv?limit=100GiB&codec=none&policy=lru&sync=false")
    assert Path(store.folder) == tmp_path / "kv"
    assert store.limit == 100 << 30


@pytest.mark.parametrize("name", ["int8", "int4+zstd", "int4%2Bzstd", "zstd"])
def test_codecs_with_a_plus_in_their_name(name):
    assert open_store(f"memory://1GiB?codec={name}").codec == name.replace("%2B", "+")
    assert open_store(f"file://kv?codec={name}").codec == name.replace("%2B", "+")


def test_redis(redis_server):
    namespace = uuid.uuid4().hex
    store = open_store(f"{redis_server.url}?ttl=3600&limit=10GiB&namespace={namespace}&codec=none&part_bytes=1MiB")
    assert isinstance(store, RedisStore)
    assert store.limit == 10 << 30
    store.put(tiny_kv("a"))
    assert 3500 < redis_server.client().ttl(f"{namespace}:entry:a") <= 3600


def test_redis_with_a_password_of_odd_letters(tmp_path):
    with RedisServer(tmp_path, "--requirepass", "a|b@c/d?e") as server:
        store = open_store(f"redis://:a%7Cb%40c%2Fd%3Fe@127.0.0.1:{server.port}/0")
        assert store.put(tiny_kv("a"))


def test_redis_over_a_socket_file(tmp_path):
    with RedisServer(tmp_path, "--unixsocket", str(tmp_path / "s")):
        assert open_store(f"unix://{tmp_path}/s").put(tiny_kv("a"))


def test_s3(s3_server):
    bucket = uuid.uuid4().hex
    client = boto3.client("s3", endpoint_url=s3_server.url)
    client.create_bucket(Bucket=bucket)
    client.close()
    store = open_store(f"s3://{bucket}/kv?limit=1GiB&codec=none&endpoint_url={s3_server.url}&anon=false")
    assert isinstance(store, FsspecStore)
    assert store.limit == 1 << 30
    store.put(tiny_kv("a"))
    assert same_kv(store.get("a"), tiny_kv("a"))


def test_anything_that_fsspec_opens(tmp_path):
    store = open_store(f"local://{tmp_path}/kv")
    assert isinstance(store, FsspecStore)
    assert store.put(tiny_kv("a"))


# --- tiers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        "memory://2GiB | file://kv?limit=50GiB",
        "memory://2GiB|file://kv?limit=50GiB",
        ["memory://2GiB", "file://kv?limit=50GiB"],
        ("memory://2GiB", Path("kv")),
        [MemoryStore(2 << 30), "kv"],
    ],
)
def test_tiers(spec):
    with open_store(spec) as store:
        assert isinstance(store, TieredStore)
        assert [type(tier) for tier in store.tiers] == [MemoryStore, DiskStore]
        assert store.tiers[0].limit == 2 << 30
        store.put(tiny_kv("a"))
    assert same_kv(DiskStore("kv").get("a"), tiny_kv("a"))


def test_an_open_store_is_handed_back():
    store = MemoryStore()
    assert open_store(store) is store


def test_a_tier_that_does_not_open_closes_those_before_it(monkeypatch):
    closed = []
    monkeypatch.setattr(MemoryStore, "close", lambda self: closed.append(self))
    mine = MemoryStore()
    with pytest.raises(StoreUnavailable):
        open_store([mine, "memory://1MiB", f"redis://127.0.0.1:{free_port()}"])
    assert [store.limit for store in closed] == [1 << 20], "what was opened here, not what the caller holds"


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "messages"),
    [
        ("", ["an empty address", "memory://8GiB"]),
        ("memory://1GiB | ", ["an empty address"]),
        ([], ["at least one store"]),
        ("gopher://host/kv", ["'gopher'", "redis", "s3"]),
        ("memory://lots", ["'lots' is no size", "8GiB"]),
        ("memory://1GiB?limit=1GiB", ["no option 'limit'", "policy, codec"]),
        ("memory://1GiB?policy=fifo", ["no eviction policy 'fifo'", "lru"]),
        ("memory://1GiB?codec=mp3", ["no codec 'mp3'", "none"]),
        ("memory://1GiB?codec=none&codec=none", ["'codec' stands twice"]),
        ("file://", ["names no folder", "file:///absolute/folder"]),
        ("file://kv?limit=0", ["'0' is no size"]),
        ("file://kv?ttl=3", ["no option 'ttl'", "limit, codec, policy, sync"]),
        ("file://kv?sync=maybe", ["sync=maybe", "true or false"]),
        ("redis://localhost?ttl=soon", ["ttl=soon", "seconds"]),
        ("redis://localhost?ttl=-1", ["ttl is -1"]),
        ("redis://localhost?ttl=nan", ["ttl is nan"]),
        ("redis://localhost?policy=lru", ["no option 'policy'", "namespace"]),
        ("redis://localhost:port", ["no address of a Redis server"]),
        ("s3://bucket/kv?limit=many", ["'many' is no size"]),
        ("s3://bucket/kv?endpont_url=x", ["endpont_url"]),
    ],
)
def test_mistakes(spec, messages):
    with pytest.raises(StoreError) as raised:
        open_store(spec)
    assert all(message in str(raised.value) for message in messages), raised.value


@pytest.mark.parametrize(
    "spec", ["redis://:hush@localhost?what=1", "redis://me:hush@localhost:x", "sftp://me:hush@h/kv"]
)
def test_no_message_shows_a_password(spec):
    with pytest.raises(StoreError) as raised:
        open_store(spec)
    assert "hush" not in str(raised.value)
    assert "hush" not in str(raised.value.__cause__)


def test_what_cannot_be_reached():
    with pytest.raises(StoreUnavailable, match="start one there"):
        open_store(f"redis://127.0.0.1:{free_port()}/0")


def test_a_folder_that_cannot_be_made():
    Path("file").write_text("in the way")
    with pytest.raises(StoreUnavailable):
        open_store("file://file/kv")
    assert os.path.isfile("file")
