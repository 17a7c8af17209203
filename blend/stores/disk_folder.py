"""A folder of entry files that several processes share: names, one lock, atomic writes, and who is alive.

::

    lock                          held by whoever changes anything
    index.sqlite                  the order in which entries leave
    ab/abcdef....safetensors      an entry
    live/<process>/lock           held as long as the process lives
    live/<process>/7.tmp          a file being written
    live/<process>/<name>.pin     an entry that is not to leave

Whatever a dead process left lies in its own folder under ``live`` and is swept by the next one that looks there.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import mmap
import os
import re
import shutil
import threading
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from blend.errors import StoreUnavailable
from blend.stores.entry import Packed

__all__ = ["EntryFile", "Folder", "Mapped", "name_of"]

_SUFFIX = ".safetensors"
_SAFE = re.compile(r"[0-9a-z_-]{3,128}")


def name_of(key: str) -> str:
    """A key's file name, without its ending: the key itself, or a hash of a key that is no safe file name.

    Capitals are not safe: some file systems take them for small letters.
    """
    return key if _SAFE.fullmatch(key) else hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest() + "="


class EntryFile(NamedTuple):
    """What a listing says of an entry."""

    name: str
    path: Path
    nbytes: int
    written: float


class Mapped(NamedTuple):
    """A file's bytes, private and writable, there as long as anyone looks at them; and which file it was."""

    data: memoryview
    inode: int

    @classmethod
    def open(cls, path: Path) -> Mapped:
        """Maps a file.

        Raises:
            OSError: it is not there, or cannot be read.
        """
        descriptor = os.open(path, os.O_RDONLY)
        try:
            status = os.fstat(descriptor)
            if not status.st_size:
                return cls(memoryview(b""), status.st_ino)
            data = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)
        if hasattr(mmap, "MADV_WILLNEED"):
            data.madvise(mmap.MADV_WILLNEED)  # the disk reads on while the first layers are worked with
        return cls(memoryview(data), status.st_ino)


class Folder:
    """One process's view of the folder.

    Args:
        root: made if it is not there.
        sync: wait until the disk has what was written.

    Attributes:
        mutex: held, besides the lock, by the one thread of this process that holds that.

    Raises:
        StoreUnavailable: the folder cannot be made or written to, or this is no POSIX system.
    """

    def __init__(self, root: Path, sync: bool) -> None:
        try:
            import fcntl
        except ImportError as error:
            raise StoreUnavailable("a disk store needs the file locks of a POSIX system: use another store") from error
        self.root = root
        self.index = root / "index.sqlite"
        self._flock, self._lock_ex, self._lock_nb = fcntl.flock, fcntl.LOCK_EX, fcntl.LOCK_NB
        self._sync = sync
        self.mutex = threading.Lock()
        self._serial = itertools.count()
        self._live = root / "live"
        self._own = self._live / f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        try:
            self._live.mkdir(parents=True, exist_ok=True)
            with self.locked():
                self._own.mkdir()
                self._alive = os.open(self._own / "lock", os.O_RDWR | os.O_CREAT, 0o666)
                self._flock(self._alive, self._lock_ex)
        except OSError as error:
            raise StoreUnavailable(
                f"the folder {root} cannot be used as a store ({error.strerror or error}): name one that can be "
                "written to, on a disk with room"
            ) from error
        self.closed = False
        self._finalizer = weakref.finalize(self, _leave, os.getpid(), self._alive, self._own)

    def path(self, name: str) -> Path:
        """Where the entry of that name lies."""
        return self.root / name[:2] / f"{name}{_SUFFIX}"

    @contextlib.contextmanager
    def locked(self, wait: bool = True) -> Iterator[bool]:
        """Holds the lock against all threads and processes; gives False at once if it is taken and ``wait`` is off.

        The kernel lets go of it when its holder dies.
        """
        if not self.mutex.acquire(blocking=wait):
            yield False
            return
        try:
            # Opened each time, so that a child forked meanwhile does not hold on to it.
            descriptor = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT, 0o666)
            try:
                yield self._try_lock(descriptor, wait)
            finally:
                os.close(descriptor)
        finally:
            self.mutex.release()

    def files(self) -> Iterator[EntryFile]:
        """All entries, in no order. One that leaves meanwhile may be missing."""
        for shard in self._scan(self.root):
            if len(shard.name) == 2 and shard.is_dir():
                for file in self._scan(shard.path):
                    if file.name.endswith(_SUFFIX):
                        with contextlib.suppress(FileNotFoundError):
                            status = file.stat()
                            name = file.name[: -len(_SUFFIX)]
                            yield EntryFile(name, Path(file.path), status.st_size, status.st_mtime)

    def write(self, packed: Packed) -> Path:
        """Writes a file that nobody sees yet, and gives its place.

        Raises:
            OSError: the disk is full, or fails. Nothing is left then.
        """
        path = self._own / f"{next(self._serial)}.tmp"
        try:
            with open(path, "xb") as file:
                file.write(packed.head)
                file.writelines(packed.layers)
                file.flush()
                if self._sync:
                    os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return path

    def publish(self, written: Path, name: str) -> None:
        """Puts a written file in its place, at once and as a whole."""
        path = self.path(name)
        try:
            os.replace(written, path)
        except FileNotFoundError:
            path.parent.mkdir(exist_ok=True)
            self._sync_folder(self.root)
            os.replace(written, path)
        self._sync_folder(path.parent)

    def pin(self, name: str) -> None:
        """Says to all processes that an entry is not to leave, as long as this one lives."""
        (self._own / f"{name}.pin").touch()

    def unpin(self, name: str) -> None:
        """Takes that back."""
        (self._own / f"{name}.pin").unlink(missing_ok=True)

    def pinned(self) -> set[str]:
        """Names that some living process pins. Sweeps what the dead ones left. Needs the lock."""
        names: set[str] = set()
        for process in self._scan(self._live):
            place = Path(process.path)
            if place != self._own and not self._lives(place):
                shutil.rmtree(place, ignore_errors=True)
            else:
                names.update(file.name[: -len(".pin")] for file in self._scan(place) if file.name.endswith(".pin"))
        return names

    def close(self) -> None:
        """Leaves the folder. Files can still be found."""
        self.closed = True
        self._finalizer()

    def forked(self) -> None:
        """In a forked child: closed, and what belongs to the parent left alone."""
        if not self.closed:
            self.closed = True
            os.close(self._alive)

    def _lives(self, process: Path) -> bool:
        try:
            descriptor = os.open(process / "lock", os.O_RDWR)
        except FileNotFoundError:
            return False
        except PermissionError:  # another user's, who will sweep it
            return True
        try:
            return not self._try_lock(descriptor, wait=False)
        finally:
            os.close(descriptor)

    def _try_lock(self, descriptor: int, wait: bool) -> bool:
        try:
            self._flock(descriptor, self._lock_ex if wait else self._lock_ex | self._lock_nb)
        except BlockingIOError:
            return False
        return True

    def _scan(self, folder: Path | str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as found:
                return list(found)
        except FileNotFoundError:
            return []

    def _sync_folder(self, folder: Path) -> None:
        if self._sync:
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _leave(pid: int, alive: int, own: Path) -> None:
    if os.getpid() == pid:  # a forked child has no say in it
        shutil.rmtree(own, ignore_errors=True)
        os.close(alive)
