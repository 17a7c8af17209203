"""Retrieval with the real packaged embedder: over a few texts, and over the passages of a public data set."""

from __future__ import annotations

import json

import pytest

from retrieval import DenseIndex
from retrieval.indexes import HybridIndex, SparseIndex

TEXTS = [
    "The lighthouse keeper trims the lamp at dusk.",
    "Bread rises because yeast makes gas.",
    "The ferry crosses the strait twice a day.",
]


@pytest.fixture
def index(embedder):
    index = DenseIndex(embedder)
    index.add(TEXTS)
    return index


def test_the_nearest_text_comes_first(index):
    hits = index.search("When does the boat sail?", 3)
    assert hits[0].number == 2
    assert sorted(hit.number for hit in hits) == [0, 1, 2]


def test_a_text_finds_itself(index):
    for number, text in enumerate(TEXTS):
        (hit,) = index.search(text, 1)
        assert hit.number == number
        assert hit.score == pytest.approx(1.0, abs=1e-5)


def test_a_saved_index_needs_no_embedding(index, embedder, tmp_path):
    index.save(tmp_path)
    again = DenseIndex.load(tmp_path, embedder, mmap=True)
    assert again.search("When does the boat sail?", 3) == index.search("When does the boat sail?", 3)


def recall(index, questions, k):
    """Share of the questions whose gold passage is among the first ``k``."""
    found = [gold in {match.number for match in index.search(question, k)} for question, gold in questions]
    return sum(found) / len(found)


def passages_and_questions(file):
    """The distinct passages of a set with one gold passage a question, and its questions with the gold one's number."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    texts = list(dict.fromkeys(context["text"] for row in rows for context in row["contexts"]))
    number = {text: i for i, text in enumerate(texts)}
    gold = [number[next(context["text"] for context in row["contexts"] if context["is_gold"])] for row in rows]
    return texts, [(row["question"], place) for row, place in zip(rows, gold, strict=True)]


@pytest.mark.slow
def test_gold_passages_are_found(embedder, data):
    """SQuAD questions over more than 200 Wikipedia passages; figures are printed with ``pytest -s``."""
    file = data / "squad_xquad_en.jsonl"
    if not file.exists():
        pytest.skip(f"{file.name} is not in the data folder")
    texts, questions = passages_and_questions(file)
    dense, sparse = DenseIndex(embedder), SparseIndex()
    dense.add(texts)
    sparse.add(texts)
    found = {}
    for index in (dense, sparse, HybridIndex([dense, sparse])):
        found[index.name] = recall(index, questions, 6)
        print(f"\n{index.name}: recall@6 {found[index.name]:.3f}, {len(questions)} questions, {len(texts)} passages")
    assert found["dense"] >= 0.95
    assert found["sparse"] >= 0.95
    assert found["hybrid"] >= 0.97


def test_chinese_passages_are_found_by_their_words(data):
    file = data / "xquad_zh.jsonl"
    if not file.exists():
        pytest.skip(f"{file.name} is not in the data folder")
    texts, questions = passages_and_questions(file)
    sparse = SparseIndex()
    sparse.add(texts)
    assert recall(sparse, questions, 6) >= 0.97
