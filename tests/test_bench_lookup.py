"""The look-up bench: its figures are there and plausible. How large they are is the machine's affair."""

from __future__ import annotations

import io
import json
import math
import os

import pytest
from rich.console import Console

from blend.errors import BudgetError
from eval.bench import lookup as bench_lookup
from eval.bench.lookup import SUBJECTS, TARGETS_US, BenchFailed, LookupOptions, run_lookup_bench

SMALL = {"entries": 200, "lookups": 50, "block": 2, "path": 8}


def bench(**options):
    screen = io.StringIO()
    figures = run_lookup_bench(LookupOptions(**{**SMALL, "isolate": False, **options}), Console(file=screen, width=200))
    return figures, screen.getvalue()


def test_every_subject_has_its_figures():
    figures, text = bench()
    assert figures["complete"]
    assert [result["name"] for result in figures["results"]] == list(SUBJECTS)
    for result in figures["results"]:
        for lookup in ("hit_us", "miss_us", "unit_us"):
            times = result[lookup]
            assert 0 < times["p50"] <= times["p90"] <= times["p99"] < math.inf
        assert result["insert_us"] > 0
        assert result["evict_us"] > 0
        assert result["unit"] in ("chunk", "block")
        assert set(result["missed"]) <= set(TARGETS_US)
        assert result["name"] in text
    json.dumps(figures)


def test_a_sequence_is_divided_by_its_blocks():
    (result,) = bench(subjects=("block prefix cache",))[0]["results"]
    assert result["unit_us"]["p50"] == pytest.approx(result["hit_us"]["p50"] / 8)
    # 200 / 6 sequences of 6 blocks of their own, and 2 blocks for the one group of 64.
    assert result["entries"] == 33 * 6 + 2


def test_a_missed_target_is_told(monkeypatch):
    monkeypatch.setattr(bench_lookup, "TARGETS_US", dict.fromkeys(TARGETS_US, math.inf))
    assert "All are met." in bench(subjects=("queue lru",))[1]
    monkeypatch.setitem(bench_lookup.TARGETS_US, "p99", 0.0)
    figures, text = bench(subjects=("queue lru",))
    assert figures["results"][0]["missed"] == ["p99"]
    assert "Missed by queue lru: p99." in text


def test_each_in_a_process_of_its_own():
    figures, _ = bench(subjects=("queue lru",), isolate=True)
    assert figures["complete"]
    assert figures["results"][0]["name"] == "queue lru"


def test_a_process_that_dies_is_no_endless_wait(monkeypatch):
    monkeypatch.setattr(bench_lookup, "_send", os._exit)  # called with a pipe, it ends with an error
    with pytest.raises(BenchFailed, match="'queue lru' died"):
        bench(subjects=("queue lru",), isolate=True)


def test_interrupted_shows_what_is_done(monkeypatch):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setitem(SUBJECTS, "queue gdsf", interrupted)
    figures, text = bench(subjects=("queue lru", "queue gdsf"))
    assert not figures["complete"]
    assert [result["name"] for result in figures["results"]] == ["queue lru"]
    assert "interrupted after 1 of 2 measurements" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"entries": 3}, "entries is 3: it must be 8 or more"),
        ({"lookups": 0}, "lookups is 0"),
        ({"block": 0}, "block is 0"),
        ({"path": 3}, "path is 3: it must be 4 or more"),
        ({"subjects": ("trie",)}, "nothing named 'trie' to look up in: choose from queue lru"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(BudgetError, match=message):
        LookupOptions(**{**SMALL, **options})
