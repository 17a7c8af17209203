"""Work that can wait until nobody waits for an answer: encoding chunks that a prefilled request has missed."""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager

__all__ = ["Afterwards"]

_log = logging.getLogger("kvblend")


class Afterwards:
    """Runs jobs one by one on a thread, each begun only while no request is under way.

    Jobs of the same name are done once. A job that fails is logged and counted, and the others go on.

    Attributes:
        failed: jobs that have raised.
    """

    def __init__(self) -> None:
        self.failed = 0
        self._jobs: dict[Hashable, Callable[[], object]] = {}
        self._requests = 0
        self._current: Hashable | None = None  # name of the job that is being done
        self._drained = 0  # by so many, who wait for the jobs
        self._closed = False
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        """Jobs that are not finished."""
        with self._news:
            return len(self._jobs) + (self._current is not None)

    @contextmanager
    def request(self) -> Iterator[None]:
        """While a request is under way no job is begun."""
        with self._news:
            self._requests += 1
        try:
            yield
        finally:
            with self._news:
                self._requests -= 1
                self._news.notify_all()

    def add(self, name: Hashable, job: Callable[[], object]) -> None:
        """Puts a job in the queue, unless one of that name waits already."""
        with self._news:
            if self._closed:
                return
            self._jobs.setdefault(name, job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="kvblend-afterwards", daemon=True)
                self._thread.start()
                # An interpreter that ends while a thread computes would be aborted by torch.
                atexit.register(_close, weakref.ref(self))
            self._news.notify_all()

    def cancel(self, names: Collection[Hashable]) -> None:
        """Takes jobs out of the queue; one that is being done is waited for."""
        with self._news:
            for name in names:
                self._jobs.pop(name, None)
            self._news.wait_for(lambda: self._current not in names)

    def drain(self) -> None:
        """Returns when all jobs are done.

        Until then they are begun beside requests too: a request may be the caller's own, such as a stream half read.
        """
        for _ in self.draining():
            pass

    def draining(self) -> Iterator[int]:
        """The same step by step: how many jobs are left, each time that there are fewer."""
        with self._news:
            self._drained += 1
            self._news.notify_all()
        try:
            while left := len(self):
                yield left
                self._wait_for_fewer(left)
        finally:
            with self._news:
                self._drained -= 1

    def _wait_for_fewer(self, jobs: int) -> None:
        with self._news:
            self._news.wait_for(lambda: len(self) < jobs)

    def close(self, finish: bool = True) -> None:
        """Ends the thread; nothing is taken on after that.

        Args:
            finish: do all jobs first; else drop those that are not begun.
        """
        if finish:
            self.drain()
        with self._news:
            self._closed = True
            self._jobs.clear()
            self._news.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._closed or (self._jobs and (self._drained or not self._requests)))
                if self._closed:
                    return
                self._current = next(iter(self._jobs))
                job = self._jobs.pop(self._current)
            try:
                job()
            except Exception as error:
                self.failed += 1
                _log.warning("encoding a missed chunk afterwards failed: %s", error)
            finally:
                with self._news:
                    self._current = None
                    self._news.notify_all()


def _close(of: weakref.ref[Afterwards]) -> None:
    afterwards = of()
    if afterwards is not None:
        afterwards.close(finish=False)
