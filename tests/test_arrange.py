"""Contexts of a prompt: which are kept, in which order, and that nothing but the seed, the id and k decides."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.arrange import Arrangement, arrange
from eval.tasks import TASKS, load_set
from eval.vocabulary import Context, Example
from retrieval import SettingError

TASK = TASKS["qa"]


def example_of(marks, name="q"):
    """An example with a context per gold mark; its text is its place."""
    contexts = tuple(Context(f"text {i}", gold=mark) for i, mark in enumerate(marks))
    return Example(name, "Which text?", ("one",), contexts)


def places(example):
    return [int(context.text.split()[1]) for context in example.contexts]


MARKS = st.lists(st.sampled_from([True, False, None]), max_size=12)
ORDERS = st.sampled_from(["given", "shuffled"])


@given(MARKS, st.integers(1, 14), ORDERS, st.integers(0, 9))
def test_gold_contexts_stay(marks, k, order, seed):
    kept = places(arrange(example_of(marks), TASK, Arrangement(order, k, seed)))
    gold = [i for i, mark in enumerate(marks) if mark]
    others = [i for i, mark in enumerate(marks) if not mark]
    assert sorted(kept) == sorted(gold[:k] + others[: max(k - len(gold), 0)])
    assert order == "shuffled" or kept == sorted(kept)


@given(MARKS, ORDERS, st.integers(0, 9))
def test_everything_else_stays_too(marks, order, seed):
    before = example_of(marks)
    after = arrange(before, TASK, Arrangement(order, seed=seed))
    assert set(after.contexts) == set(before.contexts)
    assert len(after.contexts) == len(before.contexts)
    assert (after.id, after.question, after.answers, after.meta) == (
        before.id,
        before.question,
        before.answers,
        before.meta,
    )


def test_as_given_by_default():
    assert arrange(example_of([None] * 5), TASK, Arrangement()) == example_of([None] * 5)


def test_the_order_depends_on_seed_and_example():
    def shuffled(seed, name):
        return tuple(places(arrange(example_of([None] * 10, name), TASK, Arrangement("shuffled", seed=seed))))

    assert shuffled(0, "a") == shuffled(0, "a")
    assert len({shuffled(seed, name) for seed in range(4) for name in "abcd"}) == 16


def test_the_order_is_the_same_in_every_process():
    """Python's own hashes of texts differ between processes; the order must not."""
    assert places(arrange(example_of([None] * 6), TASK, Arrangement("shuffled"))) == [0, 4, 5, 2, 1, 3]


@given(MARKS, st.sampled_from(["given", "shuffled", "retrieved"]), st.none() | st.integers(1, 5))
def test_no_context(marks, order, k):
    assert arrange(example_of(marks), TASK, Arrangement(order, k, context=False), Letters()).contexts == ()


class Letters:
    """An embedder that counts letters: texts of the same words point the same way."""

    name, identity, dimension = "letters", "letters", 26

    def encode(self, texts):
        return np.array([[text.lower().count(chr(97 + i)) + 1e-3 for i in range(26)] for text in texts], np.float32)

    def encode_query(self, query):
        return self.encode([query])[0]


PIER = Example(
    "q",
    "zebra quartz jinx",
    ("one",),
    (
        Context("zebra quartz jinx"),
        Context("bread and salt", gold=True),
        Context("a zebra", title="quartz"),
        Context("fog"),
    ),
)


def test_the_best_one_stands_last():
    found = arrange(PIER, TASK, Arrangement("retrieved"), Letters())
    assert [c.text for c in found.contexts[-2:]] == ["a zebra", "zebra quartz jinx"]
    assert set(found.contexts) == set(PIER.contexts)


def test_retrieval_may_lose_gold_contexts():
    found = arrange(PIER, TASK, Arrangement("retrieved", k=2), Letters())
    assert [c.text for c in found.contexts] == ["a zebra", "zebra quartz jinx"]


def test_titles_are_searched_as_they_are_written():
    """Without its title the zebra would share one word with the question, and the fox two."""
    contexts = (Context("fox jinx quartz"), Context("a zebra jinx", title="quartz quartz zebra"))
    asked = Example("q", "quartz zebra jinx", ("one",), contexts)
    assert arrange(asked, TASK, Arrangement("retrieved", k=1), Letters()).contexts == contexts[1:]


def test_more_than_there_are():
    assert len(arrange(PIER, TASK, Arrangement("retrieved", k=99), Letters()).contexts) == 4


def test_nothing_to_retrieve():
    assert arrange(example_of([]), TASK, Arrangement("retrieved"), Letters()) == example_of([])


def test_retrieved_from_a_real_set(embedder):
    """The packaged embedder finds what is needed: in the demo set, nearly every gold passage among the best three."""
    demo = load_set("demo?contexts=10", limit=5)
    found = [arrange(asked, demo.task, Arrangement("retrieved", k=3), embedder) for asked in demo.examples]
    kept = sum(bool(c.gold) for asked in found for c in asked.contexts)
    gold = sum(bool(c.gold) for asked in demo.examples for c in asked.contexts)
    assert all(len(asked.contexts) == 3 for asked in found)
    assert kept >= 0.8 * gold


@pytest.mark.parametrize("k", [0, -1])
def test_too_few(k):
    with pytest.raises(SettingError, match=f"k is {k}: keep at least 1 context"):
        Arrangement(k=k)


def test_unknown_orders():
    with pytest.raises(SettingError, match="order is 'sorted': choose from given, shuffled, retrieved"):
        Arrangement("sorted")


def test_retrieval_needs_an_embedder():
    with pytest.raises(SettingError, match="without an embedder"):
        arrange(PIER, TASK, Arrangement("retrieved"))
