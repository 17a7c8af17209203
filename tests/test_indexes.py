"""Indexes: the conformance suite over every kind, and what each promises beyond it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from retrieval import DenseIndex, IndexMismatch, Match, SettingError
from retrieval.errors import DamagedIndex
from retrieval.indexes import HybridIndex, SparseIndex, vectors
from retrieval.indexes.folder import open_folder, saving
from retrieval.indexes.hybrid import fuse_ranks
from retrieval.indexes.vectors import APPROXIMATE_FROM, Vectors
from retrieval.indexes.words import words
from retrieval.testing import IndexTests, WordEmbedder, sentence

WORDS = WordEmbedder()
KINDS = ("flat", "ivf", "hnsw")


class TestFlat(IndexTests):
    def make(self):
        return DenseIndex(WORDS)

    def load(self, folder, mmap=False):
        return DenseIndex.load(folder, WORDS, mmap=mmap)


class TestInvertedLists(TestFlat):
    def make(self):
        return DenseIndex(WORDS, "ivf")


class TestGraph(TestFlat):
    def make(self):
        return DenseIndex(WORDS, "hnsw")


class TestSparse(IndexTests):
    def make(self):
        return SparseIndex()

    def load(self, folder, mmap=False):
        return SparseIndex.load(folder, mmap=mmap)


class TestHybrid(IndexTests):
    def make(self):
        return HybridIndex([DenseIndex(WORDS), SparseIndex()])

    def load(self, folder, mmap=False):
        return HybridIndex.load(folder, WORDS, mmap=mmap)


# --- vectors ----------------------------------------------------------------------------------


def clustered(count, seed=0, dimension=24, topics=40):
    """Unit vectors around a few topics, as embeddings are; fp32 ``[count, dimension]``."""
    draw = np.random.default_rng(seed)
    centres = np.random.default_rng(99).standard_normal((topics, dimension))
    found = centres[draw.integers(topics, size=count)] + 0.5 * draw.standard_normal((count, dimension))
    return (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)


def exact(found, query, k):
    """Numbers of the ``k`` vectors of a dict nearest to ``query``, by brute force."""
    return set(sorted(found, key=lambda number: -float(found[number] @ query))[:k])


@pytest.mark.parametrize("kind", KINDS)
def test_many_vectors_are_found(kind):
    count = 3 * APPROXIMATE_FROM
    data, queries = clustered(count), clustered(40, seed=1)
    index = Vectors(24, kind)
    index.add(data, range(count))
    assert bool(index._trained) == (kind != "flat")
    truth = dict(enumerate(data))

    def recall():
        found = [{match.number for match in index.search(query, 6)} for query in queries]
        return np.mean([len(exact(truth, query, 6) & hits) / 6 for query, hits in zip(queries, found, strict=True)])

    least = 1.0 if kind == "flat" else 0.95
    assert recall() >= least
    gone = random.Random(0).sample(range(count), count // 4)
    index.remove(gone)
    for number in gone:
        del truth[number]
    assert index.rows == count, "a quarter is not worth a new index yet"
    assert recall() >= least
    rest = random.Random(0).sample(sorted(truth), count // 4)
    index.remove(rest)
    for number in rest:
        del truth[number]
    assert index.rows < count, "more than a third is dead"
    assert recall() >= least
    assert len(index.search(queries[0], len(index))) >= 0.99 * len(index), "all were asked for"


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
def test_approximate_kinds_grow_out_of_exact_ones(kind):
    data = clustered(5 * APPROXIMATE_FROM)
    index = Vectors(24, kind)
    trained = []
    for start in range(0, len(data), 512):
        index.add(data[start : start + 512], range(start, start + 512))
        trained.append(index._trained)
    steps = [0, APPROXIMATE_FROM, 4 * APPROXIMATE_FROM] if kind == "ivf" else [0, APPROXIMATE_FROM]
    assert sorted(set(trained)) == steps
    index.remove(range(100, len(data)))
    assert index._trained == 0, "few are searched exactly again"
    assert [index.search(data[row], 1)[0].number for row in range(0, 100, 7)] == list(range(0, 100, 7))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mmap", [False, True])
def test_many_vectors_saved_loaded_and_changed(kind, mmap, tmp_path):
    data = clustered(APPROXIMATE_FROM + 200)
    index = Vectors(24, kind)
    index.add(data, range(5, len(data) + 5))
    index.remove([5, 6])
    again = Vectors.load(tmp_path, index.save(tmp_path), mmap)
    before = (tmp_path / "rows.faiss").read_bytes()
    assert [again.search(row, 9) for row in data[::50]] == [index.search(row, 9) for row in data[::50]]
    again.remove([7])
    again.add(data[:3], [5, 6, 99999])
    assert sorted(match.number for match in again.search(data[2], 2))[-1] == 99999
    assert 7 not in again.numbers()
    assert (tmp_path / "rows.faiss").read_bytes() == before
    again.remove(list(range(5, 1000)))
    assert again.search(data[1100], 1)[0].number == 1105


class Machine(RuleBasedStateMachine):
    """Vectors against a dict and brute force; thresholds so low that every kind trains and compacts all the time."""

    kind = "flat"

    def __init__(self):
        super().__init__()
        self.index = Vectors(4, self.kind, probes=2)
        self.truth = {}

    @rule(numbers=st.lists(st.integers(0, 30), max_size=8, unique=True), seed=st.integers(0, 99))
    def add(self, numbers, seed):
        data = clustered(len(numbers), seed, dimension=4)
        self.index.add(data, numbers)
        self.truth.update(zip(numbers, data, strict=True))

    @rule(numbers=st.sets(st.integers(0, 30), max_size=8))
    def remove(self, numbers):
        there = [number for number in numbers if self.truth.pop(number, None) is not None]
        assert self.index.remove(numbers) == len(there)

    @rule(seed=st.integers(0, 99), k=st.integers(1, 40))
    def search(self, seed, k):
        (query,) = clustered(1, seed, dimension=4)
        found = self.index.search(query, k)
        scores = {match.number: match.score for match in found}
        assert len(scores) == len(found) <= k
        assert [m.score for m in found] == sorted(scores.values(), reverse=True)
        for number, score in scores.items():
            assert score == pytest.approx(float(self.truth[number] @ query), abs=1e-5)
        if self.kind == "flat":
            best = sorted((float(row @ query) for row in self.truth.values()), reverse=True)[:k]
            assert sorted(scores.values(), reverse=True) == pytest.approx(best, abs=1e-5)

    @precondition(lambda self: self.truth)
    @rule(draw=st.randoms(use_true_random=False))
    def a_vector_finds_itself(self, draw):
        row = self.truth[draw.choice(sorted(self.truth))]
        assert self.index.search(row, 1)[0].score == pytest.approx(1.0, abs=1e-5)

    @rule(mmap=st.booleans())
    def save_and_load(self, mmap):
        with tempfile.TemporaryDirectory() as folder:  # a mapped file outlives its name
            self.index = Vectors.load(Path(folder), self.index.save(Path(folder)), mmap)

    @invariant()
    def the_same_numbers(self):
        assert set(self.index.numbers()) == set(self.truth)
        assert len(self.index) == len(self.truth) <= self.index.rows


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_like_a_dict(kind, monkeypatch):
    monkeypatch.setattr(vectors, "APPROXIMATE_FROM", 6)
    machine = type("Machine", (Machine,), {"kind": kind})
    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=25, deadline=None))


# --- dense ------------------------------------------------------------------------------------


def test_scores_are_cosines():
    index = DenseIndex(WORDS)
    index.add_vectors(np.stack([WORDS.encode_query("green copper") * 3, WORDS.encode_query("a ferry")]))
    (match,) = index.search("green copper", 1)
    assert (match.number, match.score) == (0, pytest.approx(1.0, abs=1e-5))
    assert index.search_vector(WORDS.encode_query("green copper") * 7, 1)[0].score == pytest.approx(1.0, abs=1e-5)


def test_vectors_in_place_of_texts():
    index, other = DenseIndex(WORDS), DenseIndex(WORDS)
    texts = [sentence(seed) for seed in range(9)]
    index.add(texts, range(10, 19))
    other.add_vectors(WORDS.encode(texts), range(10, 19))
    assert index.search(texts[4], 9) == other.search(texts[4], 9)


@pytest.mark.parametrize("shape", [(2, 5), (256,), (1, 1, 256)])
def test_vectors_of_another_shape(shape):
    with pytest.raises(SettingError, match=r"vectors of shape .*: this embedder's are \['texts', 256\]"):
        DenseIndex(WORDS).add_vectors(np.zeros(shape, dtype=np.float32))
    with pytest.raises(SettingError, match=r"this embedder's are \[256\]"):
        DenseIndex(WORDS).search_vector(np.zeros((2, 256), dtype=np.float32), 1)


def test_settings_out_of_range():
    with pytest.raises(SettingError, match="kind 'tree' is not known: take flat, ivf, hnsw"):
        DenseIndex(WORDS, "tree")
    with pytest.raises(SettingError, match="probes is 0"):
        DenseIndex(WORDS, "ivf", probes=0)


def test_the_kind_is_kept(tmp_path):
    DenseIndex(WORDS, "hnsw", probes=3).save(tmp_path)
    assert DenseIndex.load(tmp_path, WORDS).kind == "hnsw"


def test_another_embedder_is_refused(tmp_path):
    DenseIndex(WORDS).save(tmp_path / "dense")
    HybridIndex([DenseIndex(WORDS), SparseIndex()]).save(tmp_path / "hybrid")
    for other in (WordEmbedder(seed=1), WordEmbedder(dimension=32)):
        with pytest.raises(IndexMismatch, match=rf"made with embedder words-256-0 .*and this is {other.name}"):
            DenseIndex.load(tmp_path / "dense", other)
        with pytest.raises(IndexMismatch, match="made with embedder"):
            HybridIndex.load(tmp_path / "hybrid", other)


def test_an_index_of_another_kind_is_refused(tmp_path):
    SparseIndex().save(tmp_path)
    with pytest.raises(IndexMismatch, match="holds an index of kind sparse, and dense was asked for"):
        DenseIndex.load(tmp_path, WORDS)


# --- sparse -----------------------------------------------------------------------------------


def test_words_of_many_scripts():
    assert words("The Ferry, e-mail & C3PO!") == ["the", "ferry", "e", "mail", "c3po"]
    assert words("STRASSE Straße ＡＢＣ ﬁn") == ["strasse", "strasse", "abc", "fin"]
    assert words("渡口の船") == ["渡", "口", "の", "船", "渡口", "口の", "の船"]
    assert words("用Python写的") == ["用", "python", "写", "的", "写的"]
    assert words("猫。狗") == ["猫", "狗"]
    assert words("हिन्दी भाषा") == ["हिन्दी", "भाषा"]
    assert words("ภาษา")[:2] == ["ภ", "า"]
    assert words("snake_case") == ["snake", "case"]
    assert words(" ?! \n") == []


@given(st.text(), st.text())
@settings(max_examples=200, deadline=None)
def test_words_do_not_depend_on_neighbours(one, other):
    assert words(f"{one}\n{other}") == words(one) + words(other)


@given(st.text("azAZßẞσςΣéÉжЖ09 -漢字"))
@settings(max_examples=100, deadline=None)
def test_words_do_not_depend_on_case(text):
    assert words(text.upper()) == words(text.lower()) == words(text)


def test_a_query_without_known_words_matches_nothing():
    index = SparseIndex()
    index.add(["green copper", "red copper"])
    for query in ("", "?!", "zinc", "cop"):
        assert index.search(query, 5) == []
    assert [match.number for match in index.search("zinc red", 5)] == [1]


def test_texts_without_a_shared_word_are_no_matches():
    index = SparseIndex()
    index.add([sentence(seed) for seed in range(20)])
    assert [match.number for match in index.search("only7 nothing", 20)] == [7]


def test_rare_words_weigh_more():
    index = SparseIndex()
    index.add([f"the ferry {'crosses' if seed == 5 else 'waits'}" for seed in range(10)])
    first, second = index.search("the ferry crosses", 2)
    assert first.number == 5
    assert first.score > 3 * second.score


def test_scores_equal_the_formula():
    """BM25 as Lucene has it (Kamphuis et al., 2020), by hand."""
    texts = ["red red fox", "blue fox", "green tree house near water"]
    index = SparseIndex()
    index.add(texts)
    (match,) = index.search("red", 3)
    mean = (3 + 2 + 5) / 3
    weight = np.log(1 + (3 - 1 + 0.5) / (1 + 0.5))
    assert match.score == pytest.approx(weight * 2 / (2 + 1.5 * (1 - 0.75 + 0.75 * 3 / mean)), rel=1e-5)


def test_sparse_is_quiet(capfd, caplog):
    caplog.set_level(0)
    index = SparseIndex()
    index.add([sentence(seed) for seed in range(50)])
    index.search("only3", 3)
    with tempfile.TemporaryDirectory() as folder:
        index.save(folder)
        SparseIndex.load(folder).search("", 3)
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


# --- hybrid -----------------------------------------------------------------------------------


def test_ranks_are_fused_by_the_formula():
    lists = [[Match(1, 9.0), Match(2, 8.0)], [Match(2, 0.1), Match(3, 0.01)]]
    assert fuse_ranks(lists) == [
        Match(2, 1 / 62 + 1 / 61),
        Match(1, 1 / 61),
        Match(3, 1 / 62),
    ]
    assert [match.number for match in fuse_ranks([[Match(5, 1.0)], [Match(4, 1.0)]])] == [4, 5]
    assert fuse_ranks([]) == fuse_ranks([[], []]) == []


def test_one_list_keeps_its_order():
    sparse = SparseIndex()
    sparse.add([sentence(seed) for seed in range(30)])
    hybrid = HybridIndex([sparse])
    assert [m.number for m in hybrid.search(sentence(4), 9)] == [m.number for m in sparse.search(sentence(4), 9)]


def test_what_only_one_index_finds_is_found():
    index = HybridIndex([DenseIndex(WORDS), SparseIndex()])
    index.add(["part XK-417 of the winch", *(sentence(seed) for seed in range(20))])
    assert index.search("XK-417", 1)[0].number == 0
    assert len(index.search("zinc", 3)) == 3, "the dense index answers where no word is known"


def test_hybrid_settings():
    filled = SparseIndex()
    filled.add(["one text"])
    with pytest.raises(SettingError, match="at least one index"):
        HybridIndex([])
    with pytest.raises(SettingError, match="constant is -1"):
        HybridIndex([SparseIndex()], constant=-1)
    with pytest.raises(SettingError, match=r"different texts \(dense 0, sparse 1\)"):
        HybridIndex([DenseIndex(WORDS), filled])


def test_hybrid_keeps_its_constant_and_more_than_two(tmp_path):
    index = HybridIndex([SparseIndex(), DenseIndex(WORDS), SparseIndex()], constant=7)
    index.add([sentence(1)])
    index.save(tmp_path)
    again = HybridIndex.load(tmp_path, WORDS)
    assert (again.constant, [part.name for part in again.indexes]) == (7, ["sparse", "dense", "sparse"])
    assert again.search("only1", 1) == [Match(0, pytest.approx(3 / 8))]


# --- folders ----------------------------------------------------------------------------------


def test_a_save_that_fails_leaves_the_former_index(tmp_path):
    index = SparseIndex()
    index.add([sentence(1)])
    index.save(tmp_path)

    def interrupted():
        with saving(tmp_path, "sparse", {}) as files:
            (files / "half").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert SparseIndex.load(tmp_path).search("only1", 1)[0].number == 0
    assert len(list(tmp_path.iterdir())) == 2, "what was begun is gone"


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DamagedIndex, match="the sparse index cannot be saved in"):
        SparseIndex().save(tmp_path / "file")


def test_an_index_of_a_later_format(tmp_path, monkeypatch):
    monkeypatch.setattr("retrieval.indexes.folder.FORMAT", 2)
    SparseIndex().save(tmp_path)
    monkeypatch.undo()
    with pytest.raises(IndexMismatch, match="format 2, this version reads 1"):
        open_folder(tmp_path, "sparse")


SAVE_FOR_EVER = """
import sys
from retrieval.indexes import SparseIndex
from retrieval.testing import sentence
index = SparseIndex()
for seed in range(10**6):
    index.add([sentence(seed)], [0])
    index.save(sys.argv[1])
    print(seed, flush=True)
"""


def test_killed_while_saving(tmp_path):
    """At whatever instant the process dies, a whole index is there, no older than the last finished save."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SAVE_FOR_EVER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as saver:
        assert saver.stdout is not None
        seen = [int(next(saver.stdout)) for _ in range(5)]
        saver.send_signal(signal.SIGKILL)
        seen += [int(line) for line in saver.stdout]
    index = SparseIndex.load(tmp_path)
    assert any(index.search(f"only{seed}", 1) for seed in (seen[-1], seen[-1] + 1))
    index.save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2, "what the dead process left is gone"
