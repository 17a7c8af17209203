"""Orders of passages: permutations, and as much known prefix as ties allow."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from retrieval.document import Hit, Passage
from retrieval.errors import SettingError
from retrieval.order import ORDERS, best_last, by_score, cache_aware


def hits_of(*scores):
    """A hit per score; the passage's number is its place."""
    return [Hit(Passage(number, f"text {number}", "document"), score) for number, score in enumerate(scores)]


def numbers(hits):
    return [hit.passage.number for hit in hits]


def known_of(sequences, rows=10):
    """What a prefix cache that holds these sequences of passages knows: ``rows`` for each passage of the prefix."""

    def known(hits):
        asked = numbers(hits)
        shared = 0
        for sequence in sequences:
            length = 0
            while length < min(len(asked), len(sequence)) and asked[length] == sequence[length]:
                length += 1
            shared = max(shared, length)
        return rows * shared

    return known


def test_by_score_is_stable():
    assert numbers(by_score(hits_of(0.1, 0.5, 0.5, 0.9))) == [3, 1, 2, 0]
    assert by_score([]) == []


def test_best_last():
    assert numbers(best_last(hits_of(0.9, 0.1, 0.5))) == [1, 2, 0]


@pytest.mark.parametrize(
    ("scores", "sequences", "margin", "order"),
    [
        ((3, 2, 1), [[2, 1, 0]], 0.0, [0, 1, 2]),  # no ties, no choice
        ((1, 1, 1), [[2, 1, 0]], 0.0, [2, 1, 0]),
        ((1, 1, 1), [[2]], 0.0, [2, 0, 1]),  # the rest stays by score
        ((3.0, 2.9, 2.8), [[2, 0]], 0.1, [0, 1, 2]),  # 2.8 is not within 0.1 of 3.0
        ((3.0, 2.9, 2.8), [[2, 0]], 0.25, [2, 0, 1]),
        ((3.0, 2.9, 1.5, 1.4), [[1, 0, 3, 2]], 0.2, [1, 0, 3, 2]),  # on through the next run
        ((3.0, 2.9, 1.5, 1.4), [[3, 2, 1, 0]], 0.2, [0, 1, 2, 3]),  # no hit leaves its run
        ((1, 1, 1), [[1, 0, 2], [2, 1]], 0.0, [1, 0, 2]),
        ((1, 1), [], 0.0, [0, 1]),
        ((), [[1]], 0.0, []),
    ],
)
def test_cache_aware(scores, sequences, margin, order):
    assert numbers(cache_aware(hits_of(*scores), known_of(sequences), margin)) == order


def test_a_greedy_choice_never_costs_rows():
    """Taking the longest step first leads into a dead end here; then the order by score is as good as any."""
    lengths = {(0,): 5, (0, 1): 50, (1,): 20}

    def known(hits):
        asked = tuple(numbers(hits))
        return max((rows for prefix, rows in lengths.items() if asked[: len(prefix)] == prefix), default=0)

    assert numbers(cache_aware(hits_of(1, 1), known)) == [0, 1]


def test_without_ties_nothing_is_asked():
    def known(hits):
        raise AssertionError("a prefix was looked up for nothing")

    assert numbers(cache_aware(hits_of(3, 2, 1), known)) == [0, 1, 2]


@pytest.mark.parametrize("margin", [-0.1, float("nan")])
def test_margins_out_of_range(margin):
    with pytest.raises(SettingError, match="margin is"):
        cache_aware(hits_of(1, 2), known_of([]), margin)


SCORES = st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.25, 0.5, 0.9, 1.0]), max_size=7)
SEQUENCES = st.lists(st.permutations(range(7)).flatmap(lambda p: st.integers(1, 7).map(lambda n: p[:n])), max_size=4)


@given(SCORES, SEQUENCES, st.sampled_from([0.0, 0.1, 0.3, 2.0]))
@example([1.0, 1.0, 1.0], [[2, 0, 1], [1, 2]], 0.0)
@settings(deadline=None)
def test_every_order_permutes(scores, sequences, margin):
    hits = hits_of(*scores)
    for order in ORDERS.values():
        found = order(hits, known_of(sequences), margin)
        assert sorted(numbers(found)) == numbers(hits)
        assert all(hits[hit.passage.number] is hit for hit in found)


@given(SCORES, SEQUENCES, st.sampled_from([0.0, 0.1, 0.3, 2.0]))
@settings(max_examples=200, deadline=None)
def test_cache_aware_keeps_runs_and_knows_no_less(scores, sequences, margin):
    hits, known = hits_of(*scores), known_of(sequences)
    found = cache_aware(hits, known, margin)
    assert known(found) >= known(by_score(hits))
    best = None
    for now, plain in zip(found, by_score(hits), strict=True):
        # At each place stands a hit of the run that stands there by score.
        if best is None or best - plain.score > margin:
            best = plain.score
        assert 0 <= best - now.score <= margin
    if len(set(scores)) == len(scores) and margin == 0:
        assert found == by_score(hits)


@given(st.permutations(range(5)), SEQUENCES)
@settings(deadline=None)
def test_one_known_order_of_ties_is_found(order, sequences):
    found = cache_aware(hits_of(*[0.5] * 5), known_of([order]))
    assert numbers(found) == order
    assert known_of([order])(found) == 50


def test_names():
    assert sorted(ORDERS) == ["best-last", "cache-aware", "score"]
    hits = hits_of(0.5, 0.5, 0.1)
    assert [numbers(ORDERS[name](hits, known_of([[1, 0]]), 0.0)) for name in sorted(ORDERS)] == [
        [2, 1, 0],
        [1, 0, 2],
        [0, 1, 2],
    ]
