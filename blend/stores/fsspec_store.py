"""A store of one object per entry, on anything that fsspec opens: S3, Google Cloud Storage, Azure, SFTP, a folder.

An object holds the bytes described in :mod:`blend.stores.entry`, and is named after its key.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, unquote

import fsspec

from blend.errors import CorruptEntry, StoreError, StoreUnavailable
from blend.stores.codecs import Codec
from blend.stores.entry import HEAD_GUESS, Bytes, Head, Packed, head_size
from blend.stores.eviction import LRU, EvictionQueue
from blend.stores.remote import RemoteStore, without_secrets

__all__ = ["FsspecStore"]

_SUFFIX = ".safetensors"
_RANGE = 8 << 20
"""Larger reads are cut into ranges of this size, which are fetched at once."""

_NAME_LENGTH = 200
"""Longest part of a path; most file systems end at 255 bytes."""

_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "memory"}
"""Protocols where a put is seen whole or not at all, and where there are no folders to make."""

_S3_DEFAULTS: dict[str, Any] = {
    # The library's own waits would hold a request up for half a minute and more before it is a miss.
    "config_kwargs": {"connect_timeout": 1, "read_timeout": 5, "retries": {"max_attempts": 1}},
    # A listing kept would hide what other processes do.
    "use_listings_cache": False,
}


class FsspecStore(RemoteStore):
    """Keeps every entry as an object below ``url``. ``s3://`` needs the extra ``s3``: ``pip install 'kvblend[s3]'``.

    A head, or a layer, is read by its byte range, several ranges at once.

    Args:
        url: place of the objects, such as ``s3://bucket/kv``.
        limit: bytes of objects; least recently used out first. Kept by this process alone: it starts from a listing,
            and does not see what others write or read afterwards. None for no limit.
        codec: what entries are written as; each is read as what it was written.
        clock: seconds, for the pauses after a failure.
        storage_options: handed to the file system, such as ``endpoint_url`` or ``anon``.

    Raises:
        BudgetError: the limit is not positive.
        StoreError: no such protocol or option, or its library is not installed.
        StoreUnavailable: nobody answers there, or there is no such bucket.
    """

    ahead_bytes = 8 << 20

    def __init__(
        self,
        url: str,
        *,
        limit: int | None = None,
        codec: Codec | str = "none",
        clock: Callable[[], float] = time.monotonic,
        **storage_options: Any,
    ) -> None:
        # Every library behind fsspec has errors of its own.
        errors, refusals = (Exception,), (PermissionError, NotImplementedError)
        super().__init__(without_secrets(url), limit=limit, codec=codec, errors=errors, refusals=refusals, clock=clock)
        self._fs, self._root = _open(url, storage_options)
        protocol = self._fs.protocol
        self._objects = bool(_OBJECT_STORES & set([protocol] if isinstance(protocol, str) else protocol))
        self._queue = EvictionQueue(LRU())
        self._lock = threading.RLock()
        try:
            self._prepare()
        except Exception as error:
            raise StoreUnavailable(
                f"{self.name} cannot be used ({type(error).__name__}: {error}): "
                "see that it is there, and that the credentials and the endpoint are right"
            ) from error

    def _prepare(self) -> None:
        if self._objects:
            self._fs.info(self._root.split("/")[0])  # the bucket; below it nothing need exist
        else:
            self._fs.makedirs(self._root, exist_ok=True)
        if self.limit is not None:
            found = self._found(detail=True)
            for path in sorted(found, key=lambda path: _modified(found[path])):
                self._queue.add(self._key(path), found[path]["size"])

    # --- transport --------------------------------------------------------------------------------

    def _read_heads(self, keys: Sequence[str]) -> list[Bytes | None]:
        paths = [self._path(key) for key in keys]
        blobs = self._ranges(paths, [(0, HEAD_GUESS)] * len(paths))
        if self.limit is not None:
            with self._lock:
                for key in keys:
                    self._queue.use(key)
        return [blob if blob is None else self._rest(path, blob) for path, blob in zip(paths, blobs, strict=True)]

    def _rest(self, path: str, blob: bytes) -> Bytes:
        """The whole head, where the guess of its size was too small."""
        for _ in range(2):  # the length of its JSON is known at once, that of the whole head when the JSON is
            size = _needed(blob)
            if len(blob) >= size:
                break
            blob = self._ranges([path], [(0, size)])[0] or b""
        return blob

    def _read_layers(self, head: Head, indices: Sequence[int]) -> list[Bytes | None]:
        begin, stop = head.spans[indices[0]][0], head.spans[indices[-1]][1]
        spans = [(at, min(at + _RANGE, stop)) for at in range(begin, stop, _RANGE)]
        blobs = self._ranges([self._path(head.kv.key)] * len(spans), spans)
        if None in blobs:
            return [None] * len(indices)
        data = memoryview(b"".join(blob for blob in blobs if blob is not None))
        return [data[head.spans[i][0] - begin : head.spans[i][1] - begin] for i in indices]

    def _write(self, key: str, packed: Packed) -> bool:
        path, data = self._path(key), b"".join((packed.head, *packed.layers))
        with self._booked(key, packed.nbytes):
            if self._objects:
                self._fs.pipe_file(path, data)
                return True
            temporary = f"{self._root}/.{uuid.uuid4().hex}.part"
            try:
                self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
                self._fs.pipe_file(temporary, data)
                self._fs.mv(temporary, path)
            except BaseException:
                if self._fs.exists(temporary):
                    self._fs.rm_file(temporary)
                raise
        return True

    def _remove(self, key: str) -> bool:
        with self._lock:
            self._queue.remove(key)
        try:
            self._size(self._path(key))
            self._fs.rm_file(self._path(key))
        except FileNotFoundError:
            return False
        return True

    def _has(self, key: str) -> bool:
        try:
            self._size(self._path(key))
        except FileNotFoundError:
            return False
        return True

    def _list(self) -> list[str]:
        return [self._key(path) for path in self._found()]

    # --- the limit --------------------------------------------------------------------------------

    @contextmanager
    def _booked(self, key: str, nbytes: int) -> Iterator[None]:
        """Makes room and books an entry, unless writing it fails. One at a time: nobody counts half a change."""
        if self.limit is None:
            yield
            return
        with self._lock:
            self._queue.remove(key)
            while self._queue.nbytes + nbytes > self.limit and (victim := self._queue.evict()) is not None:
                self.stats.add(evicted=self._remove(str(victim.key)))
            yield
            self._queue.add(key, nbytes)

    # --- paths ------------------------------------------------------------------------------------

    def _path(self, key: str) -> str:
        """Content keys stand as they are; other text is quoted, and cut into folders where that is too long a name."""
        name = quote(key, safe="")
        pieces = [name[at : at + _NAME_LENGTH] for at in range(0, max(1, len(name)), _NAME_LENGTH)]
        return f"{self._root}/{'/'.join(pieces)}{_SUFFIX}"

    def _key(self, path: str) -> str:
        return unquote(path[len(self._root) + 1 : -len(_SUFFIX)].replace("/", ""))

    def _found(self, detail: bool = False) -> Any:
        self._fs.invalidate_cache()
        found = self._fs.find(self._root, detail=detail)
        if detail:
            return {path: info for path, info in found.items() if path.endswith(_SUFFIX)}
        return [path for path in found if path.endswith(_SUFFIX)]

    def _size(self, path: str) -> int:
        """Bytes of an object; FileNotFoundError where there is none."""
        self._fs.invalidate_cache()
        info = self._fs.info(path)
        if info["type"] != "file":
            raise FileNotFoundError(path)
        return int(info["size"])

    def _ranges(self, paths: list[str], spans: Sequence[tuple[int, int]]) -> list[bytes | None]:
        """Bytes of several ranges at once, cut off where the object ends; None where there is none."""
        starts, ends = [start for start, _ in spans], [stop for _, stop in spans]
        answers = self._fs.cat_ranges(paths, starts, ends, on_error="return")
        return [self._checked(*item) for item in zip(answers, paths, starts, strict=True)]

    def _checked(self, answer: bytes | Exception, path: str, start: int) -> bytes | None:
        if not isinstance(answer, Exception):
            return answer
        if isinstance(answer, FileNotFoundError):
            return None
        if self._size(path) <= start:
            return b""  # a range that begins behind the end is an error for some servers
        raise answer


def _needed(blob: bytes) -> int:
    """Bytes of a head, as far as it can be told; 0 where it is damaged, which its reader will say."""
    try:
        size = head_size(blob)
    except CorruptEntry:
        return 0
    return 8 + int.from_bytes(blob[:8], "little") if size is None else size


def _open(url: str, storage_options: dict[str, Any]) -> tuple[Any, str]:
    protocol = url.split("://")[0]
    if protocol in ("s3", "s3a"):
        storage_options = {**_S3_DEFAULTS, **storage_options}
    try:
        # An instance of its own: one that others use could be closed, or told to cache, under its feet.
        fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, **storage_options)
    except ImportError as error:
        extra = "kvblend[s3]" if protocol in ("s3", "s3a") else f"what fsspec needs for {protocol}"
        raise StoreError(f"{without_secrets(url)} cannot be opened ({error}): pip install '{extra}'") from error
    except (ValueError, TypeError) as error:
        raise StoreError(
            f"{without_secrets(url)} cannot be opened with the options {sorted(storage_options)}: {error}"
        ) from error
    if protocol in ("s3", "s3a"):
        fs.retries = 1  # the store tries again by itself, a pause later
    return fs, root.rstrip("/")


def _modified(info: dict[str, Any]) -> float:
    """When an object was last written, as far as its file system tells."""
    when = next((info[name] for name in ("mtime", "LastModified", "updated", "created") if name in info), 0.0)
    return float(when.timestamp() if hasattr(when, "timestamp") else when)
