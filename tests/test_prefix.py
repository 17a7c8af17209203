"""Prefix caches against their conformance suite."""

from __future__ import annotations

import numpy as np
import pytest

from blend import BudgetError
from blend.prefix import LinearPrefixCache, PrefixHit
from blend.testing.prefix import PrefixCacheTests, exact_kv


class TestLinearPrefixCache(PrefixCacheTests):
    def make(self, limit=1 << 30):
        return LinearPrefixCache(limit)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_cache_without_room_is_refused(limit):
    with pytest.raises(BudgetError, match="positive"):
        LinearPrefixCache(limit)


class LastOnly(LinearPrefixCache):
    """Forgets all but the last sequence."""

    def insert(self, ids, layers, *, extra=""):
        self._entries.clear()
        return super().insert(ids, layers, extra=extra)


class AnyPlace(LastOnly):
    """Finds the tokens wherever they stand."""

    def match(self, ids, **options):
        for _, known in self._entries:
            known = tuple(np.frombuffer(known, dtype=np.int64))
            for start in range(len(known)):
                if tuple(ids) == known[start : start + len(ids)] and ids:
                    return PrefixHit(len(ids), lambda known=known: exact_kv(known[: len(ids)]))
        return super().match(ids, **options)


class WrongRows(LastOnly):
    """Hands out the KV of the end of what it knows."""

    def match(self, ids, **options):
        hit = super().match(ids, **options)
        return hit and PrefixHit(hit.rows, lambda: tuple((k + 1, v) for k, v in hit.layers))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("test_against_brute_force", LastOnly),
        ("test_branches", LastOnly),
        ("test_a_longer_sequence_over_a_shorter_and_back", LastOnly),
        ("test_first_tokens_must_agree", AnyPlace),
        ("test_whole_sequence_and_its_parts", WrongRows),
        ("test_a_full_cache_forgets_and_never_lies", WrongRows),
    ],
)
def test_the_suite_finds_a_broken_cache(name, kind):
    suite = type("T", (PrefixCacheTests,), {"make": lambda self, limit=1 << 30: kind()})
    with pytest.raises(AssertionError):
        getattr(suite(), name)()
