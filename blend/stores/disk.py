"""A store in a folder that several processes may share: one safetensors file an entry. Knows nothing of models."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from blend.chunk import ChunkKV
from blend.errors import BudgetError, CorruptEntry, StoreError, StoreUnavailable
from blend.stores.base import Store
from blend.stores.codecs import Codec, codec_by_name
from blend.stores.disk_folder import EntryFile, Folder, Mapped, name_of
from blend.stores.disk_index import Index
from blend.stores.disk_rebuild import agree, open_index, written_key
from blend.stores.entry import ForeignEntry, Packed, pack, read_head
from blend.stores.eviction import Policy, policy_by_name
from blend.stores.forking import watch_forks
from blend.stores.listing import Listed
from blend.stores.watched import WatchedLayers

__all__ = ["DiskStore"]

_USES = 256
"""Uses that are collected in memory before they are written to the index."""


class DiskStore(Store):
    """Keeps at most ``limit`` bytes of entry files; what the policy thinks least of leaves first.

    The files are the truth: a reader opens the file of its key, checks it, and needs no lock. An index beside them
    says in which order they leave; it is built anew from the files where it is missing or damaged. Writers take turns
    under one lock, and keep to one rule, so that a kill at any instant leaves the limit intact: *every file has a row
    that counts at least its bytes*. A file appears after its row was committed, and a row goes after its file.

    Several processes may share the folder as writers and readers; each keeps its own limit whenever it puts. Beside the
    entries lie the index (some hundred bytes an entry) and one file for each write in progress. A store may go on being
    used after a fork, in parent and child.

    Entries are mapped, not read: their pages are the kernel's file pages, and stay valid after the entry left. Nobody
    but a store may change or cut files in place. The folder must be on a local disk: file locks and atomic
    renames are not to be relied on over NFS and its like; use one of the remote stores between machines.

    Args:
        folder: made if it is not there.
        limit: bytes of entry files.
        codec: what entries are written as; each is read as what it was written.
        policy: who leaves first, by name or as an object of this store's own; the same for all who share the folder.
        sync: wait for the disk at every put. Without it a power cut may cost the latest entries, never a right answer.

    Raises:
        BudgetError: the limit is not positive.
        StoreError: there is no such policy or codec.
        StoreUnavailable: the folder cannot be made or written to.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        limit: int = 100 << 30,
        *,
        codec: Codec | str = "none",
        policy: Policy | str = "lru",
        sync: bool = True,
    ) -> None:
        if limit <= 0:
            raise BudgetError(f"limit is {limit} bytes: a disk store needs a positive one, such as 100 << 30")
        self.folder = Path(folder).absolute()
        self.limit = limit
        self._codec = codec_by_name(codec) if isinstance(codec, str) else codec
        self.codec = self._codec.name
        self._policy = policy_by_name(policy) if isinstance(policy, str) else policy
        self._sync = sync
        self._uses: list[tuple[str, float]] = []
        self._pins: dict[str, int] = {}
        self._open_folder = Folder(self.folder, sync)
        self._agreed = False
        try:
            with self._open_folder.locked(), self._index():
                pass
        except (OSError, sqlite3.Error) as error:
            raise StoreUnavailable(f"the store in {self.folder} cannot be opened: {error}") from error
        watch_forks(self)

    @property
    def nbytes(self) -> int:
        """Bytes of all entry files now."""
        return sum(file.nbytes for file in self._open_folder.files())

    # --- reading: no lock -------------------------------------------------------------------------

    def get(self, key: str) -> ChunkKV | None:
        return self._read(key, layerwise=False)

    def get_many(self, keys: Sequence[str], *, layerwise: bool = False) -> list[ChunkKV | None]:
        return [self._read(key, layerwise) for key in keys]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._path(key).exists()

    def keys(self) -> Iterator[str]:
        found = []
        for file in self._open_folder.files():
            key = self._key(file)
            if key is not None:
                found.append(key)
        return iter(found)

    def peek(self, key: str) -> Listed | None:
        """What an entry's head says, or None; nothing is counted, and nothing removed."""
        try:
            data = Mapped.open(self._path(key)).data
        except OSError:
            return None
        try:
            head = read_head(data, key)
        except StoreError:
            return Listed(key, None, "", len(data))
        return Listed(key, head.kv.fingerprint, head.codec.name, len(data))

    # --- writing: under the lock ------------------------------------------------------------------

    def put(self, kv: ChunkKV) -> bool:
        packed = pack(kv, self._codec)
        if packed.nbytes > self.limit:
            self.stats.add(refused=1)
            return False
        try:
            written = self._this_process().write(packed)
        except (OSError, StoreUnavailable):
            self.stats.add(failures=1)
            return False
        try:
            return self._changed(lambda index: self._publish(index, kv, packed, written))
        finally:
            written.unlink(missing_ok=True)

    def delete(self, key: str) -> bool:
        return self._changed(lambda index: self._remove(index, name_of(key)))

    def pin(self, key: str) -> bool:
        """Keeps an entry from being evicted, by any process, until as many :meth:`unpin` or this process's end."""
        return self._changed(lambda _: self._pin(key))

    def unpin(self, key: str) -> bool:
        return self._changed(lambda _: self._unpin(name_of(key)))

    def close(self) -> None:
        if not self._open_folder.closed:
            self._changed(self._book_uses)
            self._pins.clear()
            self._open_folder.close()

    def _changed(self, work: Callable[[Index], bool]) -> bool:
        """Does ``work`` under the lock. A disk that fails is counted, and False."""
        try:
            with self._this_process().locked(), self._index() as index:
                return work(index)
        except (OSError, sqlite3.Error, StoreUnavailable):
            self._agreed = False  # the index may be what failed
            self.stats.add(failures=1)
            return False

    def _publish(self, index: Index, kv: ChunkKV, packed: Packed, written: Path) -> bool:
        name, size = name_of(kv.key), packed.nbytes
        self._book_uses(index)
        old = index.size_of([name])
        # Until it is replaced the old file counts.
        counted = max(old, size)
        if not self._make_room(index, counted - old, name):
            self.stats.add(refused=1)
            return False
        index.add(name, counted, kv.retention, time.time())
        index.commit()
        self._open_folder.publish(written, name)
        if counted > size:
            index.resize(name, size)
        return True

    def _make_room(self, index: Index, nbytes: int, name: str = "") -> bool:
        """Evicts until ``nbytes`` more fit; False, and nothing left, if they never will. ``name`` stays."""
        missing = index.nbytes + nbytes - self.limit
        if missing <= 0:
            return True
        spare = {name, *self._open_folder.pinned()}
        if index.size_of(spare) + nbytes > self.limit:
            return False
        for victim in index.victims(missing, spare, time.time()):
            self._open_folder.path(str(victim.key)).unlink(missing_ok=True)
            index.evicted(victim)
            self.stats.add(evicted=1)
        index.commit()
        return True

    def _remove(self, index: Index, name: str, inode: int | None = None) -> bool:
        """Removes an entry; with ``inode``, only if it is still that file."""
        path = self._open_folder.path(name)
        there = path.exists()
        if there and inode is not None and path.stat().st_ino != inode:
            return False
        path.unlink(missing_ok=True)
        index.remove(name)
        while self._unpin(name):
            pass
        return there

    def _pin(self, key: str) -> bool:
        name = name_of(key)
        if key not in self:
            return False
        if name not in self._pins:
            self._open_folder.pin(name)
        self._pins[name] = self._pins.get(name, 0) + 1
        return True

    def _unpin(self, name: str) -> bool:
        if name not in self._pins:
            return False
        self._pins[name] -= 1
        if not self._pins[name]:
            self._open_folder.unpin(name)
            del self._pins[name]
        return True

    # --- the folder and its index -----------------------------------------------------------------

    def _path(self, key: str) -> Path:
        return self._open_folder.path(name_of(key))

    def _this_process(self) -> Folder:
        """The folder; entered anew when it was closed, or this is a forked child."""
        if self._open_folder.closed:
            self._open_folder = Folder(self.folder, self._sync)
        return self._open_folder

    @property
    def fork_mutex(self) -> threading.Lock:
        """Held by the thread of this process that changes the folder."""
        return self._open_folder.mutex

    def forked(self) -> None:
        """A child starts as a process of its own; uses and pins are the parent's."""
        self._open_folder.forked()
        self._uses, self._pins = [], {}

    @contextmanager
    def _index(self) -> Iterator[Index]:
        """The index, which says what the folder says. Needs the lock."""
        with open_index(self._open_folder, self._policy, check=not self._agreed) as index:
            if index.new or not self._agreed:
                self.stats.add(corrupt=agree(index, self._open_folder))
                self._agreed = True
            yield index

    def _key(self, file: EntryFile) -> str | None:
        """A listed file's key; None for what is no entry, or left meanwhile."""
        if name_of(file.name) == file.name:
            return file.name
        try:
            return written_key(Mapped.open(file.path).data)
        except (OSError, CorruptEntry):
            return None

    # --- one entry --------------------------------------------------------------------------------

    def _read(self, key: str, layerwise: bool) -> ChunkKV | None:
        begin = time.perf_counter()
        try:
            file = Mapped.open(self._path(key))
        except FileNotFoundError:
            self.stats.add(misses=1)
            return None
        except OSError:
            self.stats.add(misses=1, failures=1)
            return None
        try:
            head = read_head(file.data, key)
            if len(file.data) != head.size:
                raise CorruptEntry(f"entry {key[:12]} has {len(file.data)} bytes and should have {head.size}")

            def read(index: int) -> memoryview:
                start, stop = head.spans[index]
                return file.data[start:stop]

            kv = (
                head.kv.with_layers(
                    WatchedLayers(head, read, self.stats, lambda error: self._drop(key, file.inode, error))
                )
                if layerwise
                else head.whole(read)
            )
        except CorruptEntry as error:
            self.stats.add(misses=1)
            self._drop(key, file.inode, error)
            return None
        except StoreError:  # its codec is not known here
            self.stats.add(misses=1, failures=1)
            return None
        nbytes = head.spans[0][0] if layerwise and head.spans else head.size
        self.stats.add(hits=1, bytes_read=nbytes, read_seconds=time.perf_counter() - begin)
        self._used(key)
        return kv

    def _drop(self, key: str, inode: int, error: CorruptEntry) -> None:
        """Counts and removes an entry that is not what it should be."""
        self.stats.add(**{"foreign" if isinstance(error, ForeignEntry) else "corrupt": 1})
        self._changed(lambda index: self._remove(index, name_of(key), inode))

    def _used(self, key: str) -> None:
        self._uses.append((name_of(key), time.time()))
        if len(self._uses) >= _USES:
            try:
                with self._this_process().locked(wait=False) as got:
                    if got:  # else the next use tries again
                        with self._index() as index:
                            self._book_uses(index)
            except (OSError, sqlite3.Error, StoreUnavailable):
                self._agreed = False
                self.stats.add(failures=1)

    def _book_uses(self, index: Index) -> bool:
        uses, self._uses = self._uses, []
        for name, now in uses:
            index.use(name, now)
        return True
