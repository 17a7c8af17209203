"""The conformance suite of eviction policies: the queue behind a policy against a plain search through all entries.

::

    class TestMyPolicy(PolicyTests):
        cases = (("put a", "put b", "use a", "out b a"),)

        def make(self):
            return MyPolicy()

Any test runner that collects ``test_`` methods will do.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from blend.chunk import DEFAULT_PRIORITY, DEFAULT_RETENTION, Retention
from blend.stores.eviction import Entry, EvictionQueue, Policy, Score

__all__ = ["Bench", "PolicyTests"]


class Bench:
    """A queue under a clock that moves on by a second with each step, beside the plainest model of it.

    Args:
        queue_type: the queue under test.
        policy: its policy.
        twin: an equal policy for the model.
    """

    def __init__(self, queue_type: type[EvictionQueue], policy: Policy, twin: Policy) -> None:
        self.now = 0.0
        self.queue = queue_type(policy, lambda: self.now)
        self._twin = twin
        self._model: dict[str, Entry] = {}
        self._turn = 0

    def put(self, key: str, nbytes: int = 1, retention: Retention = DEFAULT_RETENTION) -> None:
        """Adds an entry, or replaces it."""
        self._tick()
        self.queue.add(key, nbytes, retention)
        expires = None if retention.duration is None else self.now + retention.duration
        entry = Entry(key, nbytes, retention.cost, retention.priority, expires)
        old = self._model.pop(key, None)
        if old is not None:
            entry.uses, entry.pins, entry.score = old.uses + 1, old.pins, old.score
        self._model[key] = entry
        self._touch(entry)

    def use(self, key: str) -> None:
        """Books a use."""
        self._tick()
        self.queue.use(key)
        if key in self._model:
            self._model[key].uses += 1
            self._touch(self._model[key])

    def remove(self, key: str) -> None:
        """Takes an entry out."""
        self._tick()
        found = self.queue.remove(key)
        known = self._model.pop(key, None)
        assert (found is None) == (known is None), f"remove of {key} gave {found}"

    def pin(self, key: str, count: int = 1) -> None:
        """Adds or takes off a pin."""
        self._tick()
        entry = self._model.get(key)
        done = entry is not None and entry.pins + count >= 0
        assert self.queue.pin(key, count) == done, f"pin {key} by {count} should be {done}"
        if entry is not None and done:
            entry.pins += count

    def evict(self) -> str | None:
        """Evicts from both and compares; returns the key."""
        self._tick()
        expected = self._search()
        found = self.queue.evict()
        key = None if found is None else str(found.key)
        assert found is None or not found.pins, f"{key} left while it was pinned"
        assert key == expected, f"at second {self.now:.0f} {key} left, and {expected} was lowest"
        return key

    def check(self) -> None:
        """Both hold the same entries and bytes."""
        assert set(self.queue) == set(self._model), "other entries are held than were put and not taken out"
        assert len(self.queue) == len(self._model)
        held = sum(entry.nbytes for entry in self._model.values())
        assert self.queue.nbytes == held, f"{self.queue.nbytes} bytes are counted, and {held} are held"

    def scores(self) -> dict[str, Score]:
        """The queue's scores by key."""
        entries = {key: self.queue.get(key) for key in self._model}
        return {key: entry.score for key, entry in entries.items() if entry is not None}

    def _tick(self) -> None:
        self.now += 1

    def _touch(self, entry: Entry) -> None:
        self._turn += 1
        entry.used, entry.turn = self.now, self._turn
        entry.score = self._twin.score(entry)

    def _search(self) -> str | None:
        for entry in self._model.values():
            if self._twin.timed and entry.expires is not None and entry.expires <= self.now:
                entry.priority, entry.expires = DEFAULT_PRIORITY, None
                entry.score = self._twin.score(entry)
        free = [entry for entry in self._model.values() if not entry.pins]
        if not free:
            return None
        victim = min(free, key=lambda entry: (entry.score, entry.turn))
        del self._model[str(victim.key)]
        self._twin.evicted(victim)
        return str(victim.key)


class PolicyTests:
    """Tests of one policy, and of the queue with it.

    Attributes:
        cases: small runs worked out by hand. A step takes a second, and is one of ``put KEY [cost=S] [bytes=N]
            [priority=P] [duration=S]``, ``use KEY``, ``wait S`` and ``out KEY ...``, which evicts that many entries and
            expects these, in this order.
        queue_type: the queue.
    """

    cases: ClassVar[Sequence[Sequence[str]]] = ()
    queue_type: type[EvictionQueue] = EvictionQueue

    def make(self) -> Policy:
        """A fresh policy; all of them are equal."""
        raise NotImplementedError("a subclass says how its policy is made")

    def test_small_runs_worked_out_by_hand(self) -> None:
        assert self.cases, "a policy without an example: give cases"
        for case in self.cases:
            bench = self._bench()
            for step in case:
                _play(bench, step)

    def test_a_use_never_lowers_the_score(self) -> None:
        for seed in range(5):
            draw, bench = random.Random(seed), self._bench()
            for _ in range(300):
                before, key = bench.scores(), draw.choice("abcdef")
                if draw.random() < 0.1:
                    bench.evict()
                elif key in before:
                    bench.use(key)
                    after = bench.scores()[key]
                    assert after >= before[key], f"a use took the score from {before[key]} to {after}"
                else:
                    bench.put(key, draw.randint(1, 9), _any_retention(draw, duration=False))

    def test_scores_are_plain_numbers(self) -> None:
        """An int and a finite float: a store may keep them in a database."""
        policy = self.make()
        for nbytes, retention in ((0, Retention()), (1, Retention(1e9, 100)), (1 << 50, Retention(1e-9, 0, 0.0))):
            entry = Entry("a", nbytes, *retention[:2], retention.duration)
            for use in range(1, 50):
                entry.uses, entry.used = use, 1.75e9 + use
                entry.score = policy.score(entry)
                band, value = entry.score
                assert type(band) is int and type(value) is float, f"score {entry.score} is no (int, float)"  # noqa: PT018
                assert math.isfinite(value), f"score {entry.score} is not finite"

    def test_equal_histories_give_equal_scores(self) -> None:
        """Two objects of one policy agree: a restart, or another process, changes nothing that it need not."""
        policy, twin = self.make(), self.make()
        entry = Entry("a", 7, 0.5)
        for use in range(1, 30):
            entry.uses, entry.used = use, float(use * use)
            score = policy.score(replace(entry))
            assert twin.score(replace(entry)) == score
            entry.score = score

    def test_pinned_never_leaves(self) -> None:
        bench = self._bench()
        for key in "abc":
            bench.put(key)
        bench.pin("a")
        bench.pin("b")
        bench.pin("b")
        assert bench.evict() == "c"
        assert bench.evict() is None, "only pinned entries are left"
        bench.pin("b", -1)
        assert bench.evict() is None, "b has one pin left"
        bench.pin("b", -1)
        assert bench.evict() == "b"
        bench.put("a", 5)
        assert bench.evict() is None, "a new value of a pinned entry is pinned as well"
        bench.remove("a")
        bench.pin("a")
        bench.check()

    def test_everything_leaves_once(self) -> None:
        bench, keys = self._bench(), {f"k{i}" for i in range(200)}
        for key in sorted(keys):
            bench.put(key, len(key))
        for key in sorted(keys)[::3]:
            bench.use(key)
        assert {bench.evict() for _ in keys} == keys
        assert bench.evict() is None
        bench.check()
        assert bench.queue.nbytes == 0

    def test_against_a_plain_search(self) -> None:
        """Long random runs of all verbs: every victim and every byte."""
        for seed in range(4):
            draw, bench = random.Random(seed), self._bench()
            for _ in range(1500):
                _random_step(bench, draw)
                bench.check()

    def test_only_what_is_held_is_remembered(self) -> None:
        """Replacing, removing and using for ever does not fill memory."""
        bench = self._bench()
        for index in range(5000):
            bench.put(f"k{index % 7}", 1, Retention(1.0, 50, 1e9))
            bench.use(f"k{index % 5}")
            if index % 11 == 0:
                bench.remove(f"k{index % 7}")
        assert max(len(bench.queue._heap), len(bench.queue._expiries)) < 200, "items of entries that are gone are kept"

    def test_a_restart_forgets_no_order(self) -> None:
        """A new object that takes over stored scores puts a new entry no lower than the lowest of equal priority."""
        bench = self._bench()
        for index in range(40):
            bench.put(f"k{index}", 1 + index % 3, Retention(cost=1.0))
            bench.use(f"k{index // 2}")
            if index >= 10:
                bench.evict()
        lowest, policy = min(bench.scores().values()), self.make()
        policy.resume(lowest)
        fresh = policy.score(Entry("new", 1, 1.0, used=bench.now + 1))
        assert fresh >= lowest, f"a new entry scores {fresh}, below {lowest}, which has been held for long"

    def _bench(self) -> Bench:
        return Bench(self.queue_type, self.make(), self.make())


def _play(bench: Bench, step: str) -> None:
    verb, *words = step.split()
    if verb == "put":
        given = dict(word.split("=") for word in words[1:])
        duration = float(given["duration"]) if "duration" in given else None
        priority = int(given.get("priority", DEFAULT_PRIORITY))
        bench.put(words[0], int(given.get("bytes", 1)), Retention(float(given.get("cost", 0)), priority, duration))
    elif verb == "use":
        bench.use(words[0])
    elif verb == "wait":
        bench.now += float(words[0])
    elif verb == "out":
        gone = [bench.evict() for _ in words]
        assert gone == words, f"{gone} left, by hand it is {words}"
    else:
        raise ValueError(f"step {step!r}: it begins with put, use, wait or out")


def _random_step(bench: Bench, draw: random.Random) -> None:
    key = f"k{draw.randrange(40)}"
    match draw.choice(("put", "put", "use", "use", "use", "evict", "remove", "pin", "unpin")):
        case "put":
            bench.put(key, draw.randint(0, 99), _any_retention(draw, duration=True))
        case "use":
            bench.use(key)
        case "evict":
            bench.evict()
        case "remove":
            bench.remove(key)
        case "pin":
            bench.pin(key)
        case _:
            bench.pin(key, -1)


def _any_retention(draw: random.Random, *, duration: bool) -> Retention:
    seconds = draw.choice((None, 0.0, 20.0, 200.0)) if duration else None
    return Retention(draw.choice((0.0, 0.1, 3.0)), draw.choice((0, 35, 36, 100)), seconds)
