"""Brings a folder's index and its files to agree: after a kill, a power cut, a lost index, or a hand in the folder."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

from blend.chunk import DEFAULT_RETENTION, Retention
from blend.errors import CorruptEntry, StoreError
from blend.stores.disk_folder import EntryFile, Folder, Mapped
from blend.stores.disk_index import Index
from blend.stores.entry import Bytes, ForeignEntry, read_head
from blend.stores.eviction import Policy

__all__ = ["agree", "open_index", "written_key"]


def open_index(folder: Folder, policy: Policy, *, check: bool) -> Index:
    """The folder's index; one that is damaged, or not ours, is replaced by an empty one. Needs the lock.

    Args:
        check: look for damage on every page.

    Raises:
        sqlite3.Error: neither is possible.
    """
    try:
        return Index(folder.index, policy, check=check)
    except sqlite3.DatabaseError:
        for ending in ("", "-journal"):
            Path(f"{folder.index}{ending}").unlink(missing_ok=True)
        return Index(folder.index, policy)


def agree(index: Index, folder: Folder) -> int:
    """Makes the index what the folder says, one row a file, and sweeps what the dead left. Needs the lock.

    Returns:
        How many files were no entries, and were removed.
    """
    rows, damaged = index.sizes(), 0
    for file in folder.files():
        known = rows.pop(file.name, None)
        if known is None:
            damaged += not _adopt(index, file)
        elif known != file.nbytes:
            index.resize(file.name, file.nbytes)
    for name in rows:
        index.remove(name)
    index.resume()
    folder.pinned()
    return damaged


def written_key(data: Bytes) -> str:
    """The key that an entry says it is of.

    Raises:
        CorruptEntry: it says nothing of the kind.
    """
    try:
        table = json.loads(bytes(data[8 : 8 + int.from_bytes(data[:8], "little")]))
        return str(json.loads(table["__metadata__"]["kvblend"])["key"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptEntry("an entry whose head cannot be read: it is dropped") from error


def _adopt(index: Index, file: EntryFile) -> bool:
    """Gives a file a row; False for one that is no entry, and is removed."""
    try:
        retention = _retention(Mapped.open(file.path).data)
    except CorruptEntry:
        file.path.unlink(missing_ok=True)
        return False
    index.add(file.name, file.nbytes, retention, file.written)
    return True


def _retention(data: Bytes) -> Retention:
    try:
        return read_head(data, written_key(data)).kv.retention
    except ForeignEntry:
        return DEFAULT_RETENTION  # of another version, which may share the folder
    except CorruptEntry:
        raise
    except StoreError:
        return DEFAULT_RETENTION  # its codec is not known here
