"""The conformance suite of indexes: what was added is found, by its number, until it is removed.

::

    class TestMyIndex(IndexTests):
        def make(self):
            return MyIndex()

        def load(self, folder):
            return MyIndex.load(folder)

Any test runner that collects ``test_`` methods will do.
"""

from __future__ import annotations

import random
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from retrieval.errors import DamagedIndex, IndexMismatch, SettingError
from retrieval.indexes.base import Index, Match
from retrieval.indexes.words import words

__all__ = ["IndexTests", "WordEmbedder", "sentence"]


class WordEmbedder:
    """An embedder without a model: every word has a random direction of its own, and a text is the sum of its words.

    Args:
        dimension: length of a vector.
        seed: of the directions.
    """

    def __init__(self, dimension: int = 256, seed: int = 0) -> None:
        self.dimension = dimension
        self.name = f"words-{dimension}-{seed}"
        self.identity = xxhash.xxh3_128_hexdigest(self.name.encode())
        self._seed = seed

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors of length 1, fp32 ``[len(texts), dimension]``."""
        found = np.zeros((len(texts), self.dimension), dtype=np.float32)
        for row, text in zip(found, texts, strict=True):
            row += sum(map(self._direction, words(text)), start=np.full(self.dimension, 1e-3, np.float32))
        unit: NDArray[np.float32] = found / np.linalg.norm(found, axis=1, keepdims=True)
        return unit

    def encode_query(self, query: str) -> NDArray[np.float32]:
        """The vector of a question is that of a passage."""
        first: NDArray[np.float32] = self.encode([query])[0]
        return first

    def _direction(self, word: str) -> NDArray[np.float32]:
        seed = xxhash.xxh64_intdigest(word.encode(), seed=self._seed)
        return np.random.default_rng(seed).standard_normal(self.dimension, dtype=np.float32)


def sentence(seed: int) -> str:
    """A text of nine words, one of which stands in no other."""
    draw = random.Random(seed)
    return " ".join([f"only{seed}", *(f"word{draw.randrange(40)}" for _ in range(8))])


class IndexTests:
    """Tests of one kind of index."""

    def make(self) -> Index:
        """An empty index."""
        raise NotImplementedError("a subclass says how its index is made")

    def load(self, folder: Path, mmap: bool = False) -> Index:
        """Opens what an index like that of :meth:`make` saved."""
        raise NotImplementedError("a subclass says how its index is loaded")

    def filled(self, count: int = 30) -> Index:
        """An index of the first sentences, each by its seed."""
        index = self.make()
        index.add([sentence(seed) for seed in range(count)])
        return index

    # --- finding ----------------------------------------------------------------------------------

    def test_a_text_finds_itself(self) -> None:
        index = self.filled()
        for seed in range(30):
            assert index.search(sentence(seed), 1)[0].number == seed
            assert index.search(f"only{seed}", 1)[0].number == seed

    def test_best_first_and_each_once(self) -> None:
        found = self.filled().search(sentence(3), 12)
        assert len(found) == 12
        assert len({match.number for match in found}) == 12
        scores = [match.score for match in found]
        assert scores == sorted(scores, reverse=True), f"{scores}"
        assert all(type(match) is Match and type(match.number) is int and type(match.score) is float for match in found)

    def test_fewer_places_are_the_first_places(self) -> None:
        index = self.filled()
        assert index.search(sentence(3), 4) == index.search(sentence(3), 12)[:4]

    def test_of_equal_texts_the_lower_number_comes_first(self) -> None:
        index = self.filled()
        index.add(["a twin among twins"] * 4, [70, 50, 90, 60])
        assert [match.number for match in index.search("a twin among twins", 4)] == [50, 60, 70, 90]

    def test_more_places_than_texts(self) -> None:
        index = self.make()
        index.add(["green copper", "red copper"])
        assert sorted(match.number for match in index.search("copper", 50)) == [0, 1]

    def test_nothing_to_find(self) -> None:
        index = self.make()
        assert index.search("anything", 5) == []
        assert len(index) == 0
        assert list(index.numbers()) == []
        assert index.remove([0, 1]) == 0
        index.add([])
        assert len(index) == 0

    def test_places_below_one(self) -> None:
        for k in (0, -1):
            with raises(SettingError, f"k is {k}"):
                self.filled().search("anything", k)

    def test_odd_texts(self) -> None:
        texts = [
            "",
            " ",
            "?!",
            "x" * 20_000,
            "渡口的船由米拉驾驶",
            "Ｗｉｄｅ letters",
            "naïve Straße",
            "a\0b\nc",
            "🦦🦦",
        ]
        index = self.make()
        index.add(texts)
        assert sorted(index.numbers()) == list(range(len(texts)))
        for query in (*texts, "nothing of this"):
            assert len(index.search(query, 3)) <= 3
        assert index.search("谁驾驶船", 1)[0].number == 4
        with tempfile.TemporaryDirectory() as folder:
            index.save(folder)
            again = self.load(Path(folder))
            assert sorted(again.numbers()) == list(range(len(texts)))
            assert again.search("谁驾驶船", 3) == index.search("谁驾驶船", 3)

    # --- numbers ----------------------------------------------------------------------------------

    def test_numbers_are_counted_on_from_the_highest(self) -> None:
        index = self.make()
        index.add([sentence(0), sentence(1)])
        index.add([sentence(2)], [40])
        index.add([sentence(3), sentence(4)])
        assert sorted(index.numbers()) == [0, 1, 40, 41, 42]
        assert index.search("only4", 1)[0].number == 42
        assert len(index) == 5

    def test_numbers_have_64_bits(self) -> None:
        index = self.make()
        large = [2**62 + 1, 2**63 - 1, 2**53 + 1, 2**32]
        index.add([sentence(seed) for seed in range(4)], large)
        assert [index.search(f"only{seed}", 1)[0].number for seed in range(4)] == large

    def test_wrong_numbers_change_nothing(self) -> None:
        index = self.filled(3)
        before = sorted(index.numbers()), index.search(sentence(1), 3)
        two = [sentence(50), sentence(51)]
        wrong = [([5], "1 numbers for 2 texts"), ([5, 6, 7], "3 numbers"), ([5, 5], "5 is given twice")]
        for numbers, message in [*wrong, ([5, -1], "-1 is out of range"), ([2**63, 5], "out of range")]:
            with raises(SettingError, message):
                index.add(two, numbers)
        assert (sorted(index.numbers()), index.search(sentence(1), 3)) == before

    def test_a_number_given_again_replaces(self) -> None:
        index = self.filled()
        index.add([sentence(100), sentence(101)], [7, 200])
        assert len(index) == 31
        assert index.search("only100", 1)[0].number == 7
        assert self.best("only7", index) != 7, "the text that was replaced is still found"

    def test_removed_texts_are_gone(self) -> None:
        index = self.filled()
        assert index.remove([3, 4, 999]) == 2
        assert index.remove({3}) == 0
        assert len(index) == 28
        assert not {3, 4} & set(index.numbers())
        assert not {3, 4} & {match.number for match in index.search(sentence(3), 28)}
        index.add([sentence(3)], [3])
        assert index.search("only3", 1)[0].number == 3

    def test_all_removed_and_filled_again(self) -> None:
        index = self.filled()
        assert index.remove(list(index.numbers())) == 30
        assert index.search(sentence(1), 3) == []
        index.add([sentence(5)])
        assert [match.number for match in index.search("only5", 3)] == [0]

    def test_like_a_dict(self) -> None:
        """A long random run of all verbs."""
        index, truth, draw = self.make(), dict[int, int](), random.Random(0)
        for step in range(120):
            numbers = draw.sample(range(40), draw.randint(1, 5))
            if draw.random() < 0.6:
                truth.update((number, step * 100 + number) for number in numbers)
                index.add([sentence(truth[number]) for number in numbers], numbers)
            else:
                known = [truth.pop(number) for number in numbers if number in truth]
                assert index.remove(numbers) == len(known)
            assert set(index.numbers()) == set(truth)
            for number in draw.sample(sorted(truth), min(2, len(truth))):
                assert index.search(sentence(truth[number]), 1)[0].number == number, f"number {number} at step {step}"

    # --- folders ----------------------------------------------------------------------------------

    def test_saved_and_loaded(self) -> None:
        index = self.filled()
        index.remove([2, 9])
        for mmap in (False, True):
            with tempfile.TemporaryDirectory() as name:
                index.save(name)
                again = self.load(Path(name), mmap)
                assert set(again.numbers()) == set(index.numbers())
                for seed in range(30):
                    assert again.search(sentence(seed), 5) == index.search(sentence(seed), 5), f"{mmap=}"

    def test_an_empty_one_is_saved_and_loaded(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            self.make().save(name)
            for mmap in (False, True):
                again = self.load(Path(name), mmap)
                assert len(again) == 0
                again.add([sentence(1)])
                assert again.search("only1", 2)[0].number == 0

    def test_a_loaded_one_changes_by_itself(self) -> None:
        """Also a mapped one: neither the files nor another index over them change with it."""
        for mmap in (False, True):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                self.filled().save(folder)
                before = contents(folder)
                first, second = self.load(folder, mmap), self.load(folder, mmap)
                first.remove(range(5))
                first.add([sentence(77)], [5])
                first.add([sentence(78)])
                assert first.search("only77", 1)[0].number == 5
                assert first.search("only78", 1)[0].number == 30
                assert self.best("only3", first) not in range(6)
                assert second.search("only3", 1)[0].number == 3
                assert contents(folder) == before
                first.save(folder)
                assert second.search("only4", 1)[0].number == 4, "the files were taken away below a reader"
                assert set(self.load(folder, mmap).numbers()) == set(range(5, 31))

    def test_damage_is_seen(self) -> None:
        """Every file cut, with a byte changed, and gone; a mapped one is read no further than its size."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            self.filled().save(folder)
            for path, data in contents(folder).items():
                flipped = bytes([*data[:-3], data[-3] ^ 1, *data[-2:]])
                for damage in (data[:-1], flipped, b"", None):
                    path.unlink() if damage is None else path.write_bytes(damage)
                    for mmap in (False,) if damage == flipped else (False, True):
                        with raises(DamagedIndex, "anew"):
                            self.load(folder, mmap)
                    path.write_bytes(data)
            assert self.load(folder).search("only3", 1)[0].number == 3

    def test_no_index_there(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            for folder in (Path(name), Path(name) / "nowhere"):
                with raises(DamagedIndex, "holds no index"):
                    self.load(folder)

    def test_another_kind_of_index_there(self) -> None:
        from retrieval.indexes.folder import saving

        with tempfile.TemporaryDirectory() as name:
            with saving(name, "other", {}):
                pass
            with raises(IndexMismatch, "holds an index of kind other"):
                self.load(Path(name))

    # --- threads ----------------------------------------------------------------------------------

    def test_threads_search_while_it_changes(self) -> None:
        index, done = self.filled(), threading.Event()

        def search(seed: int) -> int:
            searches = 0
            while not done.is_set() or searches < 5:
                assert index.search(f"only{seed}", 1)[0].number == seed
                searches += 1
            return searches

        def change() -> None:
            try:
                for step in range(40):
                    index.add([sentence(1000 + step)], [1000 + step % 7])
                    index.remove([1000 + (step * 3) % 7])
            finally:
                done.set()

        with ThreadPoolExecutor(4) as pool:
            running = [pool.submit(search, seed) for seed in (1, 2, 3)]
            pool.submit(change).result()
            assert all(future.result() >= 5 for future in running)

    # --- helpers ----------------------------------------------------------------------------------

    @staticmethod
    def best(query: str, index: Index) -> int | None:
        """Number of the best match, or None."""
        found = index.search(query, 1)
        return found[0].number if found else None


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file below a folder."""
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@contextmanager
def raises(kind: type[Exception], message: str) -> Iterator[None]:
    """Fails unless the block raises ``kind`` with ``message`` in its text. Keeps the suite free of a test runner."""
    try:
        yield
    except kind as error:
        if message not in str(error):
            raise AssertionError(f"{message!r} is not in {str(error)!r}") from error
    else:
        raise AssertionError(f"nothing was raised: {kind.__name__} was expected")
