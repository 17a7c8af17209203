"""The catalogue: which documents there are, and which passages they were split into. One SQLite database, all the truth
of a pipeline: indexes and chunk KV are made from it, and can be made again. Knows no models and no indexes.

A passage is stored once, however many documents (or places of one) have it, under a number that is never given to
another passage. So an index is up to date when it holds the same numbers, and a document's text is shared with its
copies down to the KV.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from retrieval.document import Document, Passage
from retrieval.errors import DamagedIndex, UnknownDocument

__all__ = ["Catalogue", "Draft", "Entry"]

Value = TypeVar("Value")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS documents (
    id TEXT PRIMARY KEY, digest TEXT NOT NULL, title TEXT NOT NULL, source TEXT NOT NULL, metadata TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS passages (
    number INTEGER PRIMARY KEY AUTOINCREMENT, digest BLOB NOT NULL UNIQUE, text TEXT NOT NULL, ids BLOB NOT NULL,
    vector BLOB
);
CREATE TABLE IF NOT EXISTS places (
    document TEXT NOT NULL REFERENCES documents(id) ON DELETE CASCADE, ordinal INTEGER NOT NULL,
    passage INTEGER NOT NULL REFERENCES passages(number), start INTEGER NOT NULL, stop INTEGER NOT NULL, page INTEGER,
    PRIMARY KEY (document, ordinal)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_passage ON places(passage);
"""
_MANY = 500  # names per statement; SQLite takes some thousands


class Draft(NamedTuple):
    """A passage on its way into the catalogue.

    Attributes:
        digest: of all that its row depends on; equal drafts become one passage.
        text: the piece of the document.
        ids: token ids of its chunk.
        start: offset of its first character in the document.
        stop: offset behind its last.
        page: on which it begins.
        vector: fp32 ``[d]``; None without a dense index, and for a passage that is there already.
    """

    digest: bytes
    text: str
    ids: tuple[int, ...]
    start: int
    stop: int
    page: int | None = None
    vector: NDArray[np.float32] | None = None


class Entry(NamedTuple):
    """A document as the catalogue knows it."""

    id: str
    digest: str
    title: str
    source: str
    passages: int


class Catalogue:
    """Documents and passages. Safe to share by threads and processes; every change happens whole or not at all.

    Args:
        path: the database's file; None for memory.

    Raises:
        DamagedIndex: the file is no such database.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._lock = threading.RLock()
        try:
            self._db = sqlite3.connect(
                ":memory:" if path is None else path, timeout=60, isolation_level=None, check_same_thread=False
            )
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA foreign_keys = ON")
            self._db.executescript(_SCHEMA)
        except sqlite3.DatabaseError as error:
            raise DamagedIndex(
                f"{Path(path).name if path else 'memory'} is no catalogue of documents ({error}): index them again"
            ) from error

    # --- reading ----------------------------------------------------------------------------------

    @property
    def version(self) -> tuple[int, int]:
        """Something that differs after every change, by this process or another."""
        with self._lock:
            return self._one("PRAGMA data_version"), self._db.total_changes

    def __len__(self) -> int:
        return self._one("SELECT count(*) FROM passages")

    def documents(self) -> Iterator[Entry]:
        """All documents, by id."""
        yield from self._entries("")

    def document(self, name: str) -> Entry | None:
        """One document, or None."""
        return next(self._entries("WHERE id = ?", name), None)

    def numbers(self) -> set[int]:
        """Numbers of all passages."""
        return {number for (number,) in self._rows("SELECT number FROM passages")}

    def numbers_of(self, document: str) -> list[int]:
        """Numbers of a document's passages, in its order, each once."""
        rows = self._rows("SELECT passage FROM places WHERE document = ? ORDER BY ordinal", document)
        return list(dict.fromkeys(number for (number,) in rows))

    def passages(self, numbers: Sequence[int]) -> list[Passage]:
        """Passages by number, in that order; a number that is gone is left out. Of copies, the first by document id."""
        found = {number: passage for part in _parts(numbers) for number, passage in self._passages(part)}
        return [found[number] for number in numbers if number in found]

    def ids(self, numbers: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Token ids of passages by number."""
        rows = self._by_number("SELECT number, ids FROM passages", numbers)
        return {number: tuple(array("i", ids)) for number, ids in rows}

    def vectors(self, numbers: Sequence[int]) -> dict[int, NDArray[np.float32]]:
        """Vectors of passages by number, fp32 ``[d]`` each; none for a passage without one."""
        rows = self._by_number("SELECT number, vector FROM passages", numbers)
        return {number: np.frombuffer(vector, np.float32) for number, vector in rows if vector is not None}

    def known(self, digests: Collection[bytes]) -> dict[bytes, int]:
        """Numbers of those passages that are there already."""
        wanted = list(dict.fromkeys(digests))
        return dict(
            row
            for part in _parts(wanted)
            for row in self._among("SELECT digest, number FROM passages WHERE digest", part)
        )

    # --- changing ---------------------------------------------------------------------------------

    @contextmanager
    def change(self) -> Iterator[Catalogue]:
        """What is put and removed inside happens together, or, if that raises, not at all."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def put(self, document: Document, drafts: Sequence[Draft]) -> list[int]:
        """Adds a document, or puts it in the place of the one of its id; returns its passages' numbers.

        Passages that no document has any more stay until :meth:`sweep`.
        """
        self.describe(document)
        self._db.execute("DELETE FROM places WHERE document = ?", (document.id,))
        numbers = [self._number(draft) for draft in drafts]
        self._db.executemany(
            "INSERT INTO places VALUES (?, ?, ?, ?, ?, ?)",
            (
                (document.id, ordinal, number, draft.start, draft.stop, draft.page)
                for ordinal, (number, draft) in enumerate(zip(numbers, drafts, strict=True))
            ),
        )
        return numbers

    def describe(self, document: Document) -> None:
        """Writes a document's own row: what it is called, and what else is known of it."""
        self._db.execute(
            "INSERT INTO documents VALUES (?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET "
            "digest = excluded.digest, title = excluded.title, source = excluded.source, metadata = excluded.metadata "
            # What is as it was is not written: it would look like a change to all who watch the version.
            "WHERE (digest, title, source, metadata) "
            "IS NOT (excluded.digest, excluded.title, excluded.source, excluded.metadata)",
            (document.id, document.digest, document.title, document.source, json.dumps(dict(document.metadata))),
        )

    def remove(self, document: str) -> None:
        """Takes a document out; its passages stay until :meth:`sweep`.

        Raises:
            UnknownDocument: it is not there.
        """
        if not self._db.execute("DELETE FROM documents WHERE id = ?", (document,)).rowcount:
            raise UnknownDocument(f"there is no document {document!r}")

    def orphans(self) -> dict[int, tuple[int, ...]]:
        """Numbers and token ids of passages that no document has."""
        rows = self._rows("SELECT number, ids FROM passages WHERE number NOT IN (SELECT passage FROM places)")
        return {number: tuple(array("i", ids)) for number, ids in rows}

    def sweep(self, numbers: Collection[int]) -> None:
        """Takes passages out that no document has."""
        self._db.executemany("DELETE FROM passages WHERE number = ?", ((number,) for number in numbers))

    # --- life -------------------------------------------------------------------------------------

    def copy(self, path: str | os.PathLike[str]) -> None:
        """Writes all of it into another file, whole or not at all."""
        draft = Path(f"{os.fspath(path)}.{os.getpid()}.tmp")
        try:
            with self._lock, closing(sqlite3.connect(draft)) as other:
                self._db.backup(other)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)

    def close(self) -> None:
        """Lets go of the file."""
        with self._lock:
            self._db.close()

    # --- helpers ----------------------------------------------------------------------------------

    def _number(self, draft: Draft) -> int:
        vector = None if draft.vector is None else np.ascontiguousarray(draft.vector, np.float32).tobytes()
        self._db.execute(
            "INSERT INTO passages (digest, text, ids, vector) VALUES (?, ?, ?, ?) ON CONFLICT (digest) DO NOTHING",
            (draft.digest, draft.text, array("i", draft.ids).tobytes(), vector),
        )
        return self._one("SELECT number FROM passages WHERE digest = ?", draft.digest)

    def _entries(self, where: str, *values: object) -> Iterator[Entry]:
        rows = self._rows(
            "SELECT id, digest, title, source, (SELECT count(DISTINCT passage) FROM places WHERE document = id) "
            f"FROM documents {where} ORDER BY id",
            *values,
        )
        return (Entry(*row) for row in rows)

    def _passages(self, numbers: Sequence[int]) -> Iterator[tuple[int, Passage]]:
        rows = self._among(
            "SELECT number, text, document, title, source, start, stop, page, metadata FROM passages "
            "JOIN places ON passage = number JOIN documents ON document = id WHERE number",
            numbers,
            "GROUP BY number HAVING document = min(document)",
        )
        for number, text, document, title, source, start, stop, page, metadata in rows:
            yield number, Passage(number, text, document, title, source, start, stop, page, json.loads(metadata))

    def _by_number(self, select: str, numbers: Sequence[int]) -> Iterator[tuple[Any, ...]]:
        for part in _parts(numbers):
            yield from self._among(f"{select} WHERE number", part)

    def _among(self, query: str, values: Sequence[object], rest: str = "") -> list[tuple[Any, ...]]:
        return self._rows(f"{query} IN ({', '.join('?' * len(values))}) {rest}", *values)

    def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._db.execute(query, values).fetchall()

    def _one(self, query: str, *values: object) -> int:
        return int(self._rows(query, *values)[0][0])


def _parts(values: Sequence[Value]) -> Iterable[Sequence[Value]]:
    return (values[at : at + _MANY] for at in range(0, len(values), _MANY))
