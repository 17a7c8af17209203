"""Forks of this process: held back while a thread is in the middle of a change, and told to the child."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol

__all__ = ["Forkable", "watch_forks"]


class Forkable(Protocol):
    """What is not to be shared with a forked child."""

    @property
    def fork_mutex(self) -> threading.Lock:
        """Held by the thread that is changing something."""

    def forked(self) -> None:
        """Makes the child's copy a thing of its own."""


_watched: weakref.WeakSet[Forkable] = weakref.WeakSet()
_held: list[threading.Lock] = []


def watch_forks(thing: Forkable) -> None:
    """From now on, and as long as it lives."""
    _watched.add(thing)


def _before() -> None:
    _held[:] = [thing.fork_mutex for thing in list(_watched)]
    for mutex in _held:
        mutex.acquire()


def _after() -> None:
    for mutex in _held:
        mutex.release()
    _held.clear()


def _in_child() -> None:
    _after()
    for thing in list(_watched):
        thing.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_in_child)
