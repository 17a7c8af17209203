"""Workers on one folder, killed with SIGKILL at random instants; what they leave is looked at after every kill.

``python kill_driver.py FOLDER KILLS LIMIT SEED`` prints what happened as JSON, and fails where a promise was broken.
Workers are forked from this process, which has torch loaded and one thread.

Each writer has keys of its own, and puts them in versions that rise; it writes down what it is about to put, and what
it has put. All workers read all keys, and look at every bit of what they get.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from blend.errors import CorruptEntry
from blend.stores.disk import DiskStore
from blend.testing.kv import same_kv, tiny_kv

WRITERS, READERS, KEYS = 2, 2, 8
BROKEN = 90
"""Exit status of a worker that found a promise broken."""


def entry(key: str, version: int):
    """What version ``version`` of a key is: a few KB to 260 KB."""
    return tiny_kv(key, seed=version, rows=20 + version * 37 % 2000)


def right(key: str, kv) -> bool:
    return same_kv(kv, entry(key, kv.prelude[1]))


def keys_of(writer: int) -> list[str]:
    return [f"{writer:02d}{number:062x}" for number in range(KEYS)]


class Worker:
    """A child process, and the pipe through which it says that it got a step further."""

    def __init__(self, folder: Path, limit: int, number: int, seed: int) -> None:
        self.number = number
        self.log = folder.parent / f"{folder.name}.{number}.log"
        self.steps, steps = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.steps)
            try:
                work(folder, limit, number, seed, self.log, steps)
            except BaseException as error:
                print(f"worker {number}: {error!r}", file=sys.stderr, flush=True)
            finally:
                os._exit(BROKEN)
        os.close(steps)

    def kill(self, draw: random.Random) -> None:
        """Lets it go some steps and a moment on, then kills it."""
        for _ in range(draw.randint(1, 4)):
            os.read(self.steps, 1)
        time.sleep(draw.uniform(0, 0.006))  # the instant is to be anywhere within a step
        os.kill(self.pid, signal.SIGKILL)
        os.close(self.steps)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        assert status == -signal.SIGKILL, f"worker {self.number} ended by itself with {status}"


def work(folder: Path, limit: int, number: int, seed: int, log: Path, steps: int) -> None:
    """Puts and gets until it is killed."""
    draw = random.Random(seed)
    store = DiskStore(folder, limit, sync=is_roomy(limit))
    everything = [key for writer in range(WRITERS) for key in keys_of(writer)]
    versions = {key: attempted for key, (_, attempted) in read_log(log).items()}
    seen: dict[str, int] = {}
    with open(log, "a", buffering=1, encoding="utf-8") as book:
        while True:
            if number < WRITERS and draw.random() < 0.7:
                key = draw.choice(keys_of(number))
                versions[key] = versions.get(key, 0) + 1
                book.write(f"try {key} {versions[key]}\n")
                if store.put(entry(key, versions[key])):
                    book.write(f"put {key} {versions[key]}\n")
            else:
                key = draw.choice(everything)
                (kv,) = store.get_many([key], layerwise=draw.random() < 0.5)
                if kv is None:
                    assert key not in seen or not is_roomy(limit), f"{key} was there and is gone"
                else:
                    assert right(key, kv), f"{key} is wrong"
                    assert kv.prelude[1] >= seen.get(key, 0), f"{key} went back to version {kv.prelude[1]}"
                    seen[key] = kv.prelude[1]
            assert store.stats.corrupt == store.stats.foreign == store.stats.failures == 0, f"{store.stats}"
            os.write(steps, b".")


def read_log(log: Path) -> dict[str, tuple[int, int]]:
    """Per key the newest version that was put, and the newest that was tried."""
    known: dict[str, tuple[int, int]] = {}
    lines = log.read_text(encoding="utf-8").split("\n")[:-1] if log.exists() else []
    for verb, key, version in map(str.split, lines):
        done, _ = known.get(key, (0, 0))
        known[key] = (int(version) if verb == "put" else done, int(version))
    return known


def is_roomy(limit: int) -> bool:
    """Whether nothing needs to leave."""
    return limit > 1 << 28


def seen_while_all_hold_still(folder: Path, pid: int) -> tuple[int, bool]:
    """Bytes of all entry files, and whether a dead process left half a file (that nobody has swept yet)."""
    with open(folder / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        held = sum(path.stat().st_size for path in folder.glob("??/*.safetensors"))
        return held, any(any(place.glob("*.tmp")) for place in folder.glob(f"live/{pid}-*"))


def look(store: DiskStore, worker: Worker, roomy: bool) -> None:
    """What a killed writer had put is there, in the newest version; with little room it may have left instead."""
    for key, (done, attempted) in read_log(worker.log).items():
        kv = store.get(key)
        if kv is None:
            assert not roomy or not done, f"version {done} of {key} was put and is gone"
        else:
            assert right(key, kv), f"{key} is wrong"
            assert done <= kv.prelude[1] <= attempted, f"{key} is version {kv.prelude[1]}, and {done} was put"


def main(folder: Path, kills: int, limit: int, seed: int) -> dict[str, object]:
    torch.set_num_threads(1)
    draw = random.Random(seed)
    store = DiskStore(folder, limit)
    workers = [Worker(folder, limit, number, draw.getrandbits(32)) for number in range(WRITERS + READERS)]
    mid_write, most = 0, 0
    for _ in range(kills):
        number = draw.choice([*range(WRITERS)] * 3 + [*range(WRITERS, WRITERS + READERS)])
        victim = workers[number]
        victim.kill(draw)
        held, half = seen_while_all_hold_still(folder, victim.pid)
        mid_write += half
        assert held <= limit, f"{held} bytes are held, and the limit is {limit}"
        most = max(most, held)
        look(store, victim, is_roomy(limit))
        workers[number] = Worker(folder, limit, number, draw.getrandbits(32))
    for worker in workers:
        worker.kill(draw)
    return {"kills": kills, "mid_write": mid_write, "most_bytes": most, "limit": limit, **at_the_end(store)}


def at_the_end(store: DiskStore) -> dict[str, object]:
    """Nothing is left over, everything reads, and the index knows every file."""
    store.close()
    assert store.stats.corrupt == store.stats.foreign == store.stats.failures == 0, f"{store.stats}"
    with DiskStore(store.folder, store.limit) as again:
        live = list((store.folder / "live").iterdir())
        assert len(live) == 1, f"dead processes left {live}"
        assert not list(store.folder.glob("live/*/*.tmp"))
        keys = list(again.keys())
        assert all(right(key, again.get(key)) for key in keys)
        assert again.nbytes <= store.limit
        return {"entries": len(keys), "bytes": again.nbytes, "stats": again.stats.as_dict()}


if __name__ == "__main__":
    try:
        print(json.dumps(main(Path(sys.argv[1]), *map(int, sys.argv[2:]))))
    except (AssertionError, CorruptEntry) as broken:
        sys.exit(f"broken: {broken}")
