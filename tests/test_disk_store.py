"""The disk store: the conformance suites, damage, restarts, two processes, a shared limit, the file format."""

from __future__ import annotations

import base64
import os
import random
import sqlite3
import subprocess
import sys
import threading
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from safetensors import safe_open

from blend.chunk import Retention
from blend.errors import BudgetError, CorruptEntry, StoreError, StoreUnavailable
from blend.stores import entry
from blend.stores.codecs import codec_by_name
from blend.stores.disk import DiskStore
from blend.stores.disk_folder import Folder, name_of
from blend.stores.listing import Listed
from blend.testing.store_machine import store_machine
from blend.testing.stores import StoreTests, same_kv, tiny_kv

ROOT = Path(__file__).resolve().parent.parent
SIZE = entry.pack(tiny_kv("x" * 64), codec_by_name("none")).nbytes
QUICK = settings(
    deadline=None, max_examples=20, stateful_step_count=30, suppress_health_check=list(HealthCheck), database=None
)


def key(number):
    return f"{number:064x}"


def path_of(store, name):
    return store.folder / name_of(name)[:2] / f"{name_of(name)}.safetensors"


def left_over(store):
    """Files of writes that never ended."""
    return list(store.folder.glob("live/*/*.tmp"))


@pytest.fixture
def store(tmp_path):
    with DiskStore(tmp_path / "kv", sync=False) as store:
        yield store


class TestDiskStore(StoreTests):
    codec = "none"

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.folder = tmp_path

    def make(self, limit=1 << 30):
        return DiskStore(self.folder / uuid.uuid4().hex, limit, codec=self.codec, sync=False)

    def entry_size(self, kv):
        return entry.pack(kv, codec_by_name(self.codec)).nbytes


class TestDiskStoreThatRounds(TestDiskStore):
    codec = "int8"
    lossless = False
    tolerance = 0.02


@pytest.mark.parametrize("limit", [1 << 30, 4 * SIZE], ids=["roomy", "tight"])
def test_state_machine(tmp_path, limit):
    def open_store(folder):
        return DiskStore(folder, limit, sync=False)

    machine = store_machine(
        lambda: open_store(tmp_path / uuid.uuid4().hex),
        reopen=lambda old: open_store(old.folder),
        forgets=limit < 1 << 30,
    )
    run_state_machine_as_test(machine, settings=QUICK)


# --- restarts and other processes ---------------------------------------------------------------------


def test_entries_outlive_the_process_that_put_them(tmp_path):
    with DiskStore(tmp_path) as first:
        for seed in range(3):
            first.put(tiny_kv(key(seed), seed=seed))
    with DiskStore(tmp_path) as second:
        assert sorted(second.keys()) == [key(seed) for seed in range(3)]
        assert all(same_kv(second.get(key(seed)), tiny_kv(key(seed), seed=seed)) for seed in range(3))


OTHER_PROCESS = """
import sys
from blend.stores.disk import DiskStore
from blend.testing.kv import same_kv, tiny_kv
with DiskStore(sys.argv[1]) as store:
    assert same_kv(store.get("parent"), tiny_kv("parent", seed=1, rows=300))
    for seed in range(20):
        assert store.put(tiny_kv(f"child{seed}", seed=seed, rows=300))
"""


def test_one_process_puts_and_another_gets(tmp_path):
    with DiskStore(tmp_path / "kv") as store:
        store.put(tiny_kv("parent", seed=1, rows=300))
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-c", OTHER_PROCESS, str(store.folder)], check=True, env=environment)
        found = store.get_many([f"child{seed}" for seed in range(20)])
        assert all(same_kv(kv, tiny_kv(f"child{seed}", seed=seed, rows=300)) for seed, kv in enumerate(found))


def test_two_openings_share_one_limit(tmp_path):
    """Two stores on one folder are to each other what two processes are."""
    with DiskStore(tmp_path, 5 * SIZE, sync=False) as one, DiskStore(tmp_path, 5 * SIZE, sync=False) as other:
        for number in range(20):
            assert (one if number % 2 else other).put(tiny_kv(key(number), seed=number % 10))
            assert one.nbytes == other.nbytes == SIZE * min(number + 1, 5)
        assert sorted(one.keys()) == [key(number) for number in range(15, 20)]
        assert one.stats.evicted + other.stats.evicted == 15


def test_threads_on_two_openings_hold_the_limit_all_the_time(tmp_path):
    stores = [DiskStore(tmp_path, 5 * SIZE, sync=False) for _ in range(2)]
    done, held = threading.Event(), []
    watch = Folder(tmp_path, sync=False)

    def work(store, seed):
        draw = random.Random(seed)
        for _ in range(150):
            number = draw.randrange(10)
            store.put(tiny_kv(key(number), seed=number))
            found = store.get(key(draw.randrange(10)))
            assert found is None or same_kv(found, tiny_kv(found.key, seed=found.prelude[1]))

    def look():
        while not done.is_set():
            with watch.locked():
                held.append(sum(file.nbytes for file in watch.files()))

    threads = [threading.Thread(target=work, args=(store, seed)) for seed, store in enumerate(stores * 2)]
    watcher = threading.Thread(target=look)
    for thread in (watcher, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    watcher.join()
    watch.close()
    assert len(held) > 10
    assert max(held) <= 5 * SIZE
    for store in stores:
        assert (store.stats.corrupt, store.stats.foreign, store.stats.failures) == (0, 0, 0)
        store.close()


def test_a_use_in_one_process_counts_in_another(tmp_path):
    with DiskStore(tmp_path, 3 * SIZE, sync=False) as one, DiskStore(tmp_path, 3 * SIZE, sync=False) as other:
        for number in range(3):
            one.put(tiny_kv(key(number)))
        for _ in range(256):  # so many that they are written down at once
            one.get(key(0))
        other.put(tiny_kv(key(3)))
        assert sorted(other.keys()) == [key(0), key(2), key(3)]


def test_uses_are_kept_over_a_restart(tmp_path):
    with DiskStore(tmp_path, 3 * SIZE) as store:
        for number in range(3):
            store.put(tiny_kv(key(number)))
        store.get(key(0))
    with DiskStore(tmp_path, 3 * SIZE) as store:
        store.put(tiny_kv(key(3)))
        assert sorted(store.keys()) == [key(0), key(2), key(3)]


def test_a_forked_child_is_a_process_of_its_own(tmp_path):
    """And the parent goes on as if there had been no child."""
    program = """
import os, sys
from blend.stores.disk import DiskStore
from blend.testing.kv import same_kv, tiny_kv
store = DiskStore(sys.argv[1])
store.put(tiny_kv("before"))
assert store.pin("before")
child = os.fork()
if not child:
    assert not store.unpin("before"), "the parent's pin"
    assert store.put(tiny_kv("child")) and same_kv(store.get("before"), tiny_kv("before"))
    store.close()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert store.put(tiny_kv("after")) and store.unpin("before")
assert sorted(store.keys()) == ["after", "before", "child"]
assert not store.stats.failures
store.close()
assert not os.listdir(sys.argv[1] + "/live")
"""
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-W", "error", "-c", program, str(tmp_path)], check=True, env=environment)


def test_a_pin_holds_against_other_processes_and_ends_with_its_own(tmp_path):
    with DiskStore(tmp_path, 3 * SIZE, sync=False) as other:
        one = DiskStore(tmp_path, 3 * SIZE, sync=False)
        one.put(tiny_kv(key(0)))
        assert one.pin(key(0))
        for number in range(1, 6):
            assert other.put(tiny_kv(key(number)))
        assert key(0) in other
        assert not other.unpin(key(0)), "a pin is taken off by whom set it"
        one.close()
        other.put(tiny_kv(key(6)))
        assert key(0) not in other


def test_a_smaller_limit_at_the_next_opening(tmp_path):
    with DiskStore(tmp_path) as store:
        for number in range(6):
            store.put(tiny_kv(key(number)))
    with DiskStore(tmp_path, 2 * SIZE) as store:
        assert len(list(store.keys())) == 6, "to open a store, and look, removes nothing"
        store.put(tiny_kv(key(6)))
        assert sorted(store.keys()) == [key(5), key(6)]


# --- eviction -----------------------------------------------------------------------------------------


def test_the_longest_unused_entry_goes_first(tmp_path):
    with DiskStore(tmp_path, 3 * SIZE) as store:
        for number in range(3):
            store.put(tiny_kv(key(number)))
        store.get(key(0))
        store.put(tiny_kv(key(3)))
        assert sorted(store.keys()) == [key(0), key(2), key(3)]
        assert store.stats.evicted == 1


def test_retention_decides_and_outlives_a_restart_and_a_lost_index(tmp_path):
    size = entry.pack(_wanted(0, priority=90), codec_by_name("none")).nbytes
    for lose in (False, True):
        folder = tmp_path / str(lose)
        with DiskStore(folder, 3 * size, policy="priority") as store:
            for number, priority in enumerate((90, 10, 50)):
                store.put(_wanted(number, priority=priority))
        if lose:
            (folder / "index.sqlite").unlink()
        with DiskStore(folder, 3 * size, policy="priority") as store:
            for number in (3, 4):
                store.put(_wanted(number, priority=95))
            assert sorted(store.keys()) == [key(0), key(3), key(4)]


def test_a_priority_falls_when_its_time_is_over(tmp_path):
    with DiskStore(tmp_path, 1 << 20, policy="priority") as store:
        store.put(_wanted(0, priority=90, duration=0.0))
        store.put(_wanted(1, priority=60, duration=9.0))
        store.limit = store.nbytes
        store.put(_wanted(2, priority=50, duration=9.0))
        assert sorted(store.keys()) == [key(1), key(2)]


def test_another_policy_takes_over_what_lies_there(tmp_path):
    with DiskStore(tmp_path, 3 * SIZE) as store:
        for number in range(3):
            store.put(tiny_kv(key(number)))
    for name in ("hotness", "gdsf", "random", "priority", "lru"):
        with DiskStore(tmp_path, 3 * SIZE, policy=name) as store:
            assert store.put(tiny_kv(key(7)))
            assert store.put(tiny_kv(key(8)))
            assert len(list(store.keys())) == 3
            assert store.stats.failures == 0


def _wanted(number, **retention):
    return replace(tiny_kv(key(number)), retention=Retention(**retention))


# --- damage -------------------------------------------------------------------------------------------


def test_flipped_bytes_anywhere_are_found(store):
    """1,000 runs of up to 4 KiB, at random places of an entry of 33 KB: head, checksums, layers, padding."""
    draw = random.Random(0)
    good = replace(tiny_kv(key(0), rows=505), layers=tiny_kv(key(0), rows=505, dtype=torch.bfloat16).layers)
    store.put(good)
    whole = path_of(store, key(0)).read_bytes()
    for turn in range(1, 1001):
        start, length = draw.randrange(len(whole)), draw.randint(1, 4096)
        damaged = bytearray(whole)
        for place in range(start, min(start + length, len(whole))):
            damaged[place] ^= draw.randint(1, 255)
        path_of(store, key(0)).write_bytes(damaged)
        if turn % 2:
            assert store.get(key(0)) is None, f"{length} bytes flipped at {start} were handed out"
        else:
            (lazy,) = store.get_many([key(0)], layerwise=True)
            if lazy is not None:
                with pytest.raises(CorruptEntry, match="not what was written"):
                    list(lazy.layers)
        assert not path_of(store, key(0)).exists(), f"{length} bytes flipped at {start} stay"
        assert store.stats.corrupt == turn
        assert store.put(good)
    assert same_kv(store.get(key(0)), good)
    assert store.stats.failures == 0


@pytest.mark.parametrize(
    "spoil",
    [
        lambda whole: b"",
        lambda whole: whole[:5],
        lambda whole: whole[:100],
        lambda whole: whole[:-1],
        lambda whole: whole + b"\0",
        lambda whole: whole[: len(whole) // 2],
        lambda whole: bytes(len(whole)),
        lambda whole: b"\xff" * len(whole),
        lambda whole: _headed(b"[" * 50_000),
        lambda whole: _headed(b'{"check":{"shape":[1e999]}}'),
        lambda whole: _headed(b'{"check":{"shape":[-9]}}'),
    ],
    ids=["empty", "5", "100", "one short", "one more", "half", "zeros", "ones", "brackets", "infinite", "negative"],
)
def test_cut_off_and_strange_files(store, spoil):
    store.put(tiny_kv(key(0)))
    path_of(store, key(0)).write_bytes(spoil(path_of(store, key(0)).read_bytes()))
    assert store.get(key(0)) is None
    assert (store.stats.corrupt, store.stats.misses, store.stats.hits) == (1, 1, 0)
    assert key(0) not in store
    assert store.put(tiny_kv(key(0)))
    assert same_kv(store.get(key(0)), tiny_kv(key(0)))


def _headed(text):
    return len(text).to_bytes(8, "little") + text


def test_another_entrys_file_is_foreign(store):
    store.put(tiny_kv(key(0)))
    store.put(tiny_kv(key(1)))
    path_of(store, key(0)).write_bytes(path_of(store, key(1)).read_bytes())
    assert store.get(key(0)) is None
    assert (store.stats.foreign, store.stats.corrupt) == (1, 0)
    assert list(store.keys()) == [key(1)]


def test_a_file_of_another_version_is_foreign(store, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(entry, "FORMAT_VERSION", 1)
        store.put(tiny_kv(key(0)))
    assert store.get(key(0)) is None
    assert store.stats.foreign == 1


def test_a_damaged_entry_that_was_replaced_meanwhile_stays(store, tmp_path):
    """Who finds the damage removes the damaged file, not the good one that took its place."""
    store.put(tiny_kv(key(0)))
    whole = bytearray(path_of(store, key(0)).read_bytes())
    whole[-1] ^= 1
    path_of(store, key(0)).write_bytes(whole)
    (lazy,) = store.get_many([key(0)], layerwise=True)
    store.put(tiny_kv(key(0), seed=3))
    for _ in range(2):
        with pytest.raises(CorruptEntry):
            lazy.layers[1]
    assert store.stats.corrupt == 1
    assert same_kv(store.get(key(0)), tiny_kv(key(0), seed=3))


def test_an_unknown_codec_is_a_miss_and_stays(store):
    class Strange(type(codec_by_name("none"))):
        name = "strange"

    with DiskStore(store.folder, codec=Strange(), sync=False) as other:
        other.put(tiny_kv(key(0)))
    assert store.get(key(0)) is None
    assert store.stats.failures == 1
    assert key(0) in store


# --- the index ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoil", ["gone", "empty", "text", "torn", "another's"])
def test_the_index_is_built_anew(tmp_path, spoil):
    with DiskStore(tmp_path, 4 * SIZE) as store:
        for number in range(4):
            store.put(tiny_kv(key(number)))
    index = tmp_path / "index.sqlite"
    whole = index.read_bytes()
    index.unlink()
    contents = {"empty": b"", "text": b"nothing of the kind" * 99, "torn": whole[:4096] + bytes(9999)}
    if spoil == "another's":
        with sqlite3.connect(index) as db:
            db.execute("CREATE TABLE entry (surprise)")
        db.close()
    elif spoil != "gone":
        index.write_bytes(contents[spoil])
    with DiskStore(tmp_path, 4 * SIZE) as store:
        assert sorted(store.keys()) == [key(number) for number in range(4)]
        store.put(tiny_kv(key(4)))
        assert sorted(store.keys()) == [key(number) for number in range(1, 5)], "the limit, and the order of age"


def test_an_index_lost_while_stores_are_open(tmp_path):
    with DiskStore(tmp_path, 3 * SIZE) as one, DiskStore(tmp_path, 3 * SIZE) as other:
        for number in range(3):
            one.put(tiny_kv(key(number)))
        (tmp_path / "index.sqlite").unlink()
        for number in range(3, 9):
            assert (one if number % 2 else other).put(tiny_kv(key(number)))
            assert one.nbytes <= 3 * SIZE


def test_a_row_without_a_file_leaves_in_its_turn(tmp_path):
    """As a kill between the two may leave it, or somebody who cleans up by hand."""
    with DiskStore(tmp_path, 3 * SIZE) as store:
        for number in range(3):
            store.put(tiny_kv(key(number)))
        path_of(store, key(0)).unlink()
        path_of(store, key(2)).unlink()
        assert store.get(key(0)) is None
        assert not store.delete(key(2))
        store.put(tiny_kv(key(3)))
        store.put(tiny_kv(key(4)))
        assert sorted(store.keys()) == [key(1), key(3), key(4)]
        assert store.put(tiny_kv(key(5)))
        assert sorted(store.keys()) == [key(3), key(4), key(5)]


def test_files_that_no_store_wrote_are_cleared_away_or_counted(tmp_path):
    with DiskStore(tmp_path, sync=False) as store:
        store.put(tiny_kv(key(0)))
        copy = path_of(store, key(0)).read_bytes()
    (tmp_path / "index.sqlite").unlink()
    (tmp_path / "00" / f"{key(1)}.safetensors").write_bytes(b"junk")
    (tmp_path / "00" / f"{key(2)}.safetensors").write_bytes(copy)
    (tmp_path / "00" / "notes.txt").write_text("stays")
    with DiskStore(tmp_path, sync=False) as store:
        assert sorted(store.keys()) == [key(0), key(2)]
        assert store.stats.corrupt == 1
        assert store.get(key(2)) is None
        assert store.stats.foreign == 1
    assert (tmp_path / "00" / "notes.txt").exists()


def test_what_dead_processes_left_is_swept(tmp_path):
    with DiskStore(tmp_path) as living:
        dead = tmp_path / "live" / "123-dead"
        dead.mkdir()
        (dead / "lock").touch()
        (dead / "0.tmp").write_bytes(b"half a file")
        (dead / f"{key(0)}.pin").touch()
        (tmp_path / "live" / "124-deader").mkdir()
        with DiskStore(tmp_path):
            assert not dead.exists()
            assert len(list((tmp_path / "live").iterdir())) == 2
        assert living.put(tiny_kv(key(0)))


# --- disks that fail ----------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_one(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StoreUnavailable, match=r"file.*written to"):
        DiskStore(tmp_path / "file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(StoreUnavailable, match="Permission denied"):
        DiskStore(tmp_path / "kv")
    tmp_path.chmod(0o700)


FULL_DISK = """
import resource, signal, sys
from blend.stores.disk import DiskStore
from blend.testing.kv import same_kv, tiny_kv
store = DiskStore(sys.argv[1])
assert store.put(tiny_kv("small"))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
assert not store.put(tiny_kv("large", rows=2000))
assert store.stats.failures == 1 and store.stats.refused == 0
assert list(store.keys()) == ["small"] and same_kv(store.get("small"), tiny_kv("small"))
assert store.put(tiny_kv("next"))
store.close()
"""


def test_a_disk_that_takes_no_more(tmp_path):
    """A limit on file sizes fails a write in its middle, as a full disk does."""
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], check=True, env=environment)
    assert not list(tmp_path.glob("live/*/*.tmp"))


def test_a_folder_that_vanishes_is_counted_and_comes_back(store):
    store.put(tiny_kv(key(0)))
    away = store.folder.with_name("away")
    store.folder.rename(away)
    assert store.get(key(0)) is None
    assert not store.put(tiny_kv(key(1)))
    assert not store.delete(key(0))
    assert list(store.keys()) == []
    assert store.stats.failures == 2
    away.rename(store.folder)
    assert store.put(tiny_kv(key(1)))
    assert same_kv(store.get(key(0)), tiny_kv(key(0)))


def test_an_interrupted_put_leaves_nothing(store, monkeypatch):
    store.put(tiny_kv(key(0)))

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "publish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.put(tiny_kv(key(1)))
    assert not left_over(store)
    assert key(1) not in store
    with DiskStore(store.folder, sync=False) as other:
        assert other.put(tiny_kv(key(2))), "the lock is free again"
    assert store.put(tiny_kv(key(1)))


@pytest.mark.parametrize("limit", [0, -1])
def test_a_store_without_room_is_refused(tmp_path, limit):
    with pytest.raises(BudgetError, match="positive"):
        DiskStore(tmp_path, limit)


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(StoreError, match="no codec 'zip'"):
        DiskStore(tmp_path, codec="zip")
    with pytest.raises(StoreError, match="no eviction policy 'fifo'"):
        DiskStore(tmp_path, policy="fifo")


# --- reading ------------------------------------------------------------------------------------------


def test_layerwise_reading_reads_heads_only(store):
    store.put(tiny_kv(key(0), rows=500))
    (lazy,) = store.get_many([key(0)], layerwise=True)
    head = lazy.layers.head
    assert store.stats.bytes_read == head.spans[0][0] < head.size / 5
    lazy.layers[1]
    assert store.stats.bytes_read == head.spans[0][0] + head.spans[1][1] - head.spans[1][0]


def test_lazy_layers_outlive_eviction_and_replacement(store):
    truth = tiny_kv(key(0), seed=4, rows=500)
    for leave in (lambda: store.delete(key(0)), lambda: store.put(tiny_kv(key(0), seed=5, rows=500)), store.close):
        store.put(truth)
        (lazy,) = store.get_many([key(0)], layerwise=True)
        leave()
        assert same_kv(lazy, truth)


def test_whoever_writes_into_a_tensor_does_not_reach_the_file(store):
    store.put(tiny_kv(key(0)))
    for keys, values in store.get(key(0)).layers:
        keys.zero_()
        values.fill_(7)
    assert same_kv(store.get(key(0)), tiny_kv(key(0)))


def test_peeking_changes_nothing(store, monkeypatch):
    store.put(tiny_kv(key(0)))
    assert store.peek(key(0)) == Listed(key(0), "model", "none", SIZE)
    assert store.peek(key(9)) is None
    monkeypatch.setattr(entry, "FORMAT_VERSION", 99)
    assert store.peek(key(0)) == Listed(key(0), None, "", SIZE)
    assert path_of(store, key(0)).exists()
    assert store.stats == type(store.stats)()


# --- the format ---------------------------------------------------------------------------------------

GOLDEN = (
    "yAIAAAAAAAB7Il9fbWV0YWRhdGFfXyI6eyJrdmJsZW5kIjoie1wiZm9ybWF0XCI6MixcImtleVwiOlwiZ29sZGVuXCIsXCJmaW5n"
    "ZXJwcmludFwiOlwibW9kZWxcIixcImNvZGVjXCI6XCJub25lXCIsXCJpZHNcIjpbN10sXCJwcmVsdWRlXCI6WzEsMl0sXCJsZW5n"
    "dGhcIjozLFwicmV0ZW50aW9uXCI6WzAuNSw0MCxudWxsXSxcImxheWVyc1wiOltbWzEsMSwzXSxbMSwxLDFdLFwiRjMyXCIsXCJC"
    "RjE2XCJdLFtbMSwxLDNdLFsxLDEsMV0sXCJGMzJcIixcIkJGMTZcIl1dfSJ9LCJjaGVjayI6eyJkdHlwZSI6IlU4Iiwic2hhcGUi"
    "OlszLDE2XSwiZGF0YV9vZmZzZXRzIjpbMCw0OF19LCIwMDAua2V5Ijp7ImR0eXBlIjoiRjMyIiwic2hhcGUiOlsxLDEsM10sImRh"
    "dGFfb2Zmc2V0cyI6WzQ4LDYwXX0sIjAwMC52YWx1ZSI6eyJkdHlwZSI6IkJGMTYiLCJzaGFwZSI6WzEsMSwxXSwiZGF0YV9vZmZz"
    "ZXRzIjpbNjAsNjJdfSwiMDAwLnBhZCI6eyJkdHlwZSI6IlU4Iiwic2hhcGUiOlsyXSwiZGF0YV9vZmZzZXRzIjpbNjIsNjRdfSwi"
    "MDAxLmtleSI6eyJkdHlwZSI6IkYzMiIsInNoYXBlIjpbMSwxLDNdLCJkYXRhX29mZnNldHMiOls2NCw3Nl19LCIwMDEudmFsdWUi"
    "OnsiZHR5cGUiOiJCRjE2Iiwic2hhcGUiOlsxLDEsMV0sImRhdGFfb2Zmc2V0cyI6Wzc2LDc4XX0sIjAwMS5wYWQiOnsiZHR5cGUi"
    "OiJVOCIsInNoYXBlIjpbMl0sImRhdGFfb2Zmc2V0cyI6Wzc4LDgwXX19ICAgVuYMTIPw+wU1Gw/XQWGOJFz8kQGkywO2OqaOXWHU"
    "fGE6SLIIxUk433+8o1ss3ZwGAACAPwAAAMAAAAA/QEAAAAAAAEAAAIDAAACAP0BAAAA="
)


def golden_kv():
    layers = tuple(
        (torch.tensor([[[1.0, -2.0, 0.5]]]) * (i + 1), torch.tensor([[[3.0]]], dtype=torch.bfloat16)) for i in range(2)
    )
    return replace(tiny_kv("golden"), ids=(7,), prelude=(1, 2), length=3, layers=layers, retention=Retention(0.5, 40))


def test_a_file_of_today_reads_for_ever(store):
    path = path_of(store, "golden")
    path.parent.mkdir(parents=True)
    path.write_bytes(base64.b64decode(GOLDEN))
    found = store.get("golden")
    assert same_kv(found, golden_kv())
    assert found.retention == Retention(0.5, 40)


def test_the_same_entry_gives_the_same_bytes(store):
    store.put(golden_kv())
    assert base64.b64encode(path_of(store, "golden").read_bytes()).decode() == GOLDEN


def test_any_safetensors_reader_opens_it(store):
    truth = tiny_kv(key(0), rows=5)
    store.put(truth)
    with safe_open(path_of(store, key(0)), "pt") as file:
        for index, (keys, values) in enumerate(truth.layers):
            assert torch.equal(file.get_tensor(f"{index:03}.key"), keys)
            assert torch.equal(file.get_tensor(f"{index:03}.value"), values)
