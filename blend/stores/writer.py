"""Writes entries in a thread of its own, one after another. Knows nothing of where they go."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from blend.chunk import ChunkKV

__all__ = ["Job", "Writer"]


class Job(NamedTuple):
    """An entry to be written.

    Attributes:
        kv: the entry, in memory that nobody writes to.
        run: writes it; raises nothing.
        nbytes: what it takes of the queue.
    """

    kv: ChunkKV
    run: Callable[[ChunkKV], object]
    nbytes: int


class Writer:
    """A queue of at most ``limit`` bytes, first in first out, and the thread that works it off.

    There is one job a key, the newest; it can be looked up until it is done. The thread is started by the first job,
    and ended by :meth:`close`.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._nbytes = 0
        self._jobs: dict[str, Job] = {}
        self._busy: Job | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False

    def add(self, job: Job, *, wait: bool) -> bool:
        """Queues a job in place of an older one of the same key.

        Args:
            wait: until there is room, which there is for one job of any size when nothing else is queued; else a job
                without room, or whose key is queued already, is turned down.
        """
        key = job.kv.key
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._fits(job))
            elif key in self._jobs or not self._fits(job):
                return False
            self._forget(key)
            self._jobs[key] = job
            self._nbytes += job.nbytes
            if self._thread is None:
                self._closing = False
                self._thread = threading.Thread(target=self._work, name="kvblend-writer", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return True

    def get(self, key: str) -> ChunkKV | None:
        """An entry that is queued, or being written."""
        with self._changed:
            job = self._jobs.get(key)
        return job and job.kv

    def keys(self) -> list[str]:
        """Keys of entries that are queued, or being written."""
        with self._changed:
            return list(self._jobs)

    def cancel(self, key: str) -> bool:
        """Takes a job out, and waits for it where it is being written already; False when there was none."""
        with self._changed:
            known = self._forget(key)
            self._changed.wait_for(lambda: self._busy is None or self._busy.kv.key != key)
        return known

    def drain(self) -> None:
        """Waits until everything is written."""
        if threading.current_thread() is not self._thread:
            with self._changed:
                self._changed.wait_for(lambda: not self._jobs and self._busy is None)

    def close(self) -> None:
        """Drains, and ends the thread; a later job starts another."""
        self.drain()
        with self._changed:
            thread, self._closing = self._thread, True
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _fits(self, job: Job) -> bool:
        old = self._jobs.get(job.kv.key)
        others = self._nbytes - (old.nbytes if old is not None and old is not self._busy else 0)
        return others == 0 or others + job.nbytes <= self._limit

    def _forget(self, key: str) -> bool:
        job = self._jobs.pop(key, None)
        if job is not None and job is not self._busy:
            self._nbytes -= job.nbytes
        return job is not None

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closing)
                if not self._jobs:
                    self._thread = None
                    return
                job = self._busy = next(iter(self._jobs.values()))
            try:
                job.run(job.kv)
            finally:
                with self._changed:
                    self._busy = None
                    self._nbytes -= job.nbytes
                    if self._jobs.get(job.kv.key) is job:
                        del self._jobs[job.kv.key]
                    self._changed.notify_all()
