"""Work that waits until nobody waits for an answer, and work that is done once for all who want it."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from blend.afterwards import Afterwards
from blend.flight import SingleFlight


def test_jobs_run_and_are_waited_for():
    done = []
    afterwards = Afterwards()
    for number in range(5):
        afterwards.add(number, lambda number=number: done.append(number))
    afterwards.drain()
    assert done == [0, 1, 2, 3, 4]
    assert len(afterwards) == 0
    afterwards.close()


def test_no_job_is_begun_while_a_request_is_under_way():
    done = threading.Event()
    afterwards = Afterwards()
    with afterwards.request():
        with afterwards.request():
            afterwards.add("job", done.set)
        assert not done.wait(0.05), "one of two requests is still under way"
    assert done.wait(60)
    afterwards.close()


def test_draining_within_a_request_does_not_wait_for_that_request():
    """As when somebody closes a Blender with a stream half read."""
    done = []
    afterwards = Afterwards()
    with afterwards.request():
        afterwards.add("job", lambda: done.append(1))
        afterwards.drain()
        assert done == [1]
        late = threading.Event()
        afterwards.add("late", late.set)
        assert not late.wait(0.05), "nobody drains any more"
    afterwards.close()
    assert late.is_set()


def test_a_job_of_the_same_name_is_done_once():
    done = []
    afterwards = Afterwards()
    with afterwards.request():
        for _ in range(3):
            afterwards.add("same", lambda: done.append(1))
        assert len(afterwards) == 1
    afterwards.drain()
    assert done == [1]
    afterwards.close()


def test_a_job_that_fails_is_counted_and_told(caplog):
    afterwards, done = Afterwards(), []
    with caplog.at_level(logging.WARNING, "kvblend"):
        afterwards.add("bad", lambda: 1 / 0)
        afterwards.add("good", lambda: done.append(1))
        afterwards.drain()
    assert afterwards.failed == 1
    assert done == [1]
    assert "division by zero" in caplog.text
    afterwards.close()


def test_closing_finishes_the_jobs_and_takes_no_more():
    done = []
    afterwards = Afterwards()
    afterwards.add("job", lambda: done.append(1))
    afterwards.close()
    afterwards.add("late", lambda: done.append(2))
    afterwards.close()
    assert done == [1]


def test_closing_at_once_drops_what_is_not_begun():
    done = []
    afterwards = Afterwards()
    with afterwards.request():
        afterwards.add("job", lambda: done.append(1))
        afterwards.close(finish=False)
    assert done == []
    assert len(afterwards) == 0


def test_an_interpreter_that_ends_with_jobs_left_ends_well():
    code = """
import torch
from blend.afterwards import Afterwards
afterwards = Afterwards()
for number in range(50):
    afterwards.add(number, lambda: torch.randn(600, 600) @ torch.randn(600, 600))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_one_makes_it_and_the_others_get_it():
    flights, made = SingleFlight[str](), []
    start = threading.Barrier(8)

    def want(worker):
        start.wait()
        mine, others = flights.claim(["key"])
        if mine:
            assert not others
            waiting.wait(60)
            made.append(worker)
            flights.land("key", "result")
            return "result"
        asked.append(worker)
        if len(asked) == 7:
            waiting.set()
        return others["key"].result(60)

    asked, waiting = [], threading.Event()
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(want, range(8)))
    assert len(made) == 1
    assert results == ["result"] * 8


def test_landing_with_nothing_tells_the_others_to_do_it():
    flights = SingleFlight[str]()
    mine, _ = flights.claim(["a", "a", "b"])
    assert mine == ["a", "b"]
    _, others = flights.claim(["a"])
    flights.land("a", None)
    flights.land("a", "too late")
    assert others["a"].result(0) is None
    assert flights.claim(["a"])[0] == ["a"], "a key that has landed is free again"
