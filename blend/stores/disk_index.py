"""Entry files in the order in which they leave: a table beside them that several processes share. Knows no files."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable
from pathlib import Path

from blend.chunk import DEFAULT_PRIORITY, Retention
from blend.stores.eviction import Entry, Policy

__all__ = ["Index"]

VERSION = 1
"""Of the table; one of another version is thrown away and built anew from the files."""

_SCHEMA = f"""
CREATE TABLE entry (
    name TEXT PRIMARY KEY, nbytes INTEGER NOT NULL, cost REAL NOT NULL, priority INTEGER NOT NULL, expires REAL,
    uses INTEGER NOT NULL, used REAL NOT NULL, band INTEGER NOT NULL, value REAL NOT NULL
);
CREATE INDEX entry_order ON entry (band, value, used);
CREATE INDEX entry_expires ON entry (expires) WHERE expires IS NOT NULL;
CREATE TABLE total (nbytes INTEGER NOT NULL);
INSERT INTO total VALUES (0);
CREATE TRIGGER entry_in AFTER INSERT ON entry BEGIN UPDATE total SET nbytes = nbytes + new.nbytes; END;
CREATE TRIGGER entry_out AFTER DELETE ON entry BEGIN UPDATE total SET nbytes = nbytes - old.nbytes; END;
CREATE TRIGGER entry_size AFTER UPDATE OF nbytes ON entry
    BEGIN UPDATE total SET nbytes = nbytes + new.nbytes - old.nbytes; END;
CREATE TABLE ranked (policy TEXT NOT NULL);
INSERT INTO ranked VALUES ('');
PRAGMA user_version = {VERSION};
"""
_COLUMNS = "name, nbytes, cost, priority, expires, uses, used, band, value"


class Index:
    """One row per entry file, scored by a policy. Lives for one change, under the folder's lock.

    A context manager: what was changed is committed at its end, or taken back where it ends with an error. A killed
    process takes back what it had not committed, too. A power cut may damage the table, which ``check`` finds.

    It is opened for each change, since nothing of SQLite may be open across a fork, and so that all processes see the
    same table even after one of them built it anew.

    Args:
        path: the table's file; made if it is not there.
        policy: who leaves first.
        check: look for damage on every page.

    Raises:
        sqlite3.Error: this is no table of ours, or it is damaged.

    Attributes:
        new: the table was made now.
    """

    def __init__(self, path: Path, policy: Policy, *, check: bool = False) -> None:
        self._policy = policy
        self._db = sqlite3.connect(path, check_same_thread=False)
        try:
            self._db.execute("PRAGMA synchronous = OFF")
            self._db.execute("PRAGMA journal_mode = TRUNCATE")
            self.new = not self._number("SELECT count(*) FROM sqlite_master")
            if self.new:
                self._db.executescript(f"BEGIN; {_SCHEMA} COMMIT;")
            if self._number("PRAGMA user_version") != VERSION:
                raise sqlite3.DatabaseError("the index is of another version")
            if check and self._text("PRAGMA quick_check") != "ok":
                raise sqlite3.DatabaseError("the index is damaged")
        except BaseException:
            self._db.close()
            raise

    def __enter__(self) -> Index:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._db.commit()
        finally:
            self._db.close()  # takes back what was not committed

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self._number("SELECT nbytes FROM total")

    def sizes(self) -> dict[str, int]:
        """Names and bytes."""
        return dict(self._db.execute("SELECT name, nbytes FROM entry"))

    def size_of(self, names: Iterable[str]) -> int:
        """Bytes of these rows; names without one count nothing."""
        return sum(self._number("SELECT nbytes FROM entry WHERE name = ?", name) for name in names)

    def add(self, name: str, nbytes: int, retention: Retention, now: float) -> None:
        """Adds a row; one of the same name is replaced, its uses kept."""
        expires = None if retention.duration is None else now + retention.duration
        entry = Entry(name, nbytes, retention.cost, retention.priority, expires, used=now)
        old = self._entry(name)
        if old is not None:
            entry.uses, entry.score = old.uses + 1, old.score
        self._write(entry)

    def resize(self, name: str, nbytes: int) -> None:
        """Puts a row's bytes right."""
        self._db.execute("UPDATE entry SET nbytes = ? WHERE name = ?", (nbytes, name))

    def use(self, name: str, now: float) -> None:
        """Books a use; nothing happens for an unknown name."""
        entry = self._entry(name)
        if entry is not None:
            entry.uses += 1
            entry.used = max(now, entry.used)
            self._write(entry)

    def remove(self, name: str) -> None:
        """Takes a row out, if there is one."""
        self._db.execute("DELETE FROM entry WHERE name = ?", (name,))

    def victims(self, nbytes: int, spare: Collection[str], now: float) -> list[Entry]:
        """The lowest rows that together have ``nbytes``, or all there are; none of ``spare``. They are not removed."""
        self._expire(now)
        found: list[Entry] = []
        for row in self._db.execute(f"SELECT {_COLUMNS} FROM entry ORDER BY band, value, used"):
            if nbytes <= 0:
                break
            if row[0] not in spare:
                found.append(_entry(row))
                nbytes -= row[1]
        return found

    def evicted(self, entry: Entry) -> None:
        """Takes a victim out, and tells the policy."""
        self.remove(str(entry.key))
        self._policy.evicted(entry)

    def commit(self) -> None:
        """Makes what was changed so far last."""
        self._db.commit()

    def resume(self) -> None:
        """Takes over the scores there are; those of another policy mean nothing here and are given anew."""
        if self._text("SELECT policy FROM ranked") == self._policy.name:
            lowest = self._db.execute("SELECT band, value FROM entry ORDER BY band, value LIMIT 1").fetchone()
            if lowest is not None:
                self._policy.resume((lowest[0], lowest[1]))
            return
        for row in self._db.execute(f"SELECT {_COLUMNS} FROM entry ORDER BY used").fetchall():
            entry = _entry(row)
            entry.uses, entry.score = 1, (0, 0.0)
            self._write(entry)
        self._db.execute("UPDATE ranked SET policy = ?", (self._policy.name,))

    def _expire(self, now: float) -> None:
        """Priorities whose time is over fall to the default."""
        over = self._db.execute(f"SELECT {_COLUMNS} FROM entry WHERE expires <= ?", (now,)).fetchall()
        for entry in map(_entry, over):
            entry.priority, entry.expires = DEFAULT_PRIORITY, None
            self._write(entry, rank=self._policy.timed)

    def _entry(self, name: str) -> Entry | None:
        row = self._db.execute(f"SELECT {_COLUMNS} FROM entry WHERE name = ?", (name,)).fetchone()
        return None if row is None else _entry(row)

    def _write(self, entry: Entry, rank: bool = True) -> None:
        if rank:
            entry.score = self._policy.score(entry)
        row = (entry.key, entry.nbytes, entry.cost, entry.priority, entry.expires, entry.uses, entry.used, *entry.score)
        updates = ", ".join(f"{column} = excluded.{column}" for column in _COLUMNS.split(", ")[1:])
        self._db.execute(
            f"INSERT INTO entry ({_COLUMNS}) VALUES ({', '.join('?' * len(row))}) "
            f"ON CONFLICT (name) DO UPDATE SET {updates}",
            row,
        )

    def _number(self, query: str, *values: str) -> int:
        """The number that a query finds, 0 where it finds nothing."""
        row = self._db.execute(query, values).fetchone()
        return 0 if row is None else int(row[0])

    def _text(self, query: str) -> str:
        return str(self._db.execute(query).fetchone()[0])


def _entry(row: tuple[str, int, float, int, float | None, int, float, int, float]) -> Entry:
    return Entry(*row[:7], (row[7], row[8]))
