"""What stores on the other side of a connection share: heads, layers, checks, and what happens when nobody answers.

A transport moves bytes by key and may fail in any way. Here a failure becomes a counted miss, so that a request never
sees one. Knows no server and no protocol.
"""

from __future__ import annotations

import re
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from blend.chunk import ChunkKV
from blend.errors import BudgetError, CorruptEntry, StoreUnavailable
from blend.stores.base import Store
from blend.stores.breaker import Breaker
from blend.stores.codecs import Codec, codec_by_name
from blend.stores.entry import Bytes, ForeignEntry, Head, LazyLayers, Packed, pack, read_head
from blend.stores.lazy import Pair

__all__ = ["RemoteStore", "without_secrets"]

T = TypeVar("T")


class RemoteStore(Store):
    """A store whose entries are bytes elsewhere. A subclass moves them, with seven short methods that may fail.

    Args:
        name: of the server and place, without a password.
        limit: bytes of entries as stored, or None for no limit.
        codec: what entries are written as; each is read as what it was written.
        errors: what a transport raises when the server does not answer.
        refusals: what it raises when the server is there and says no, which is no reason to ask it nothing else.
        clock: seconds, for the pauses of :class:`~blend.stores.breaker.Breaker`.

    Raises:
        BudgetError: the limit is not positive.
        StoreError: there is no such codec.
        StoreUnavailable: nobody answers at ``name``.
    """

    ahead_bytes = 4 << 20
    """Layers are fetched ahead up to this many bytes when they are read one by one."""

    def __init__(
        self,
        name: str,
        *,
        limit: int | None = None,
        codec: Codec | str = "none",
        errors: tuple[type[Exception], ...],
        refusals: tuple[type[Exception], ...],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if limit is not None and limit <= 0:
            raise BudgetError(f"limit is {limit} bytes: {name} needs a positive one, or None for no limit")
        self.name = name
        self.limit = limit
        self._codec = codec_by_name(codec) if isinstance(codec, str) else codec
        self.codec = self._codec.name
        self._refusals = refusals
        self._breaker = Breaker(name, errors, answers=refusals, clock=clock)

    # --- what a transport does --------------------------------------------------------------------

    @abstractmethod
    def _read_heads(self, keys: Sequence[str]) -> list[Bytes | None]:
        """For each key bytes that begin with the whole head, or None; a use is booked where there is a limit."""

    @abstractmethod
    def _read_layers(self, head: Head, indices: Sequence[int]) -> list[Bytes | None]:
        """The bytes of layers that follow one another; None for one that is not there."""

    @abstractmethod
    def _write(self, key: str, packed: Packed) -> bool:
        """Replaces an entry, for readers all at once, and makes room for it first; False when it is not taken."""

    @abstractmethod
    def _remove(self, key: str) -> bool:
        """Removes whatever there is of an entry; False when there was nothing."""

    @abstractmethod
    def _has(self, key: str) -> bool:
        """Whether there is an entry."""

    @abstractmethod
    def _list(self) -> list[str]:
        """All keys."""

    # --- the verbs --------------------------------------------------------------------------------

    def get(self, key: str) -> ChunkKV | None:
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[str], *, layerwise: bool = False) -> list[ChunkKV | None]:
        begin = time.perf_counter()
        heads = self._heads(keys) if keys else []
        entries = [head and (self._lazy(head) if layerwise else self._whole(head)) for head in heads]
        hits = sum(entry is not None for entry in entries)
        self.stats.add(hits=hits, misses=len(keys) - hits, read_seconds=time.perf_counter() - begin)
        return entries

    def put(self, kv: ChunkKV) -> bool:
        if self._breaker.resting:
            return False  # known before anything is packed
        packed = pack(kv, self._codec)
        if self.limit is not None and packed.nbytes > self.limit:
            self.stats.add(refused=1)
            return False
        return self._ask(lambda: self._write(kv.key, packed), False)

    def delete(self, key: str) -> bool:
        return self._ask(lambda: self._remove(key), False)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._ask(lambda: self._has(key), False)

    def keys(self) -> Iterator[str]:
        nothing: list[str] = []
        return iter(self._ask(self._list, nothing))

    # --- asking -----------------------------------------------------------------------------------

    def _ask(self, ask: Callable[[], T], otherwise: T) -> T:
        try:
            return self._call(ask)
        except StoreUnavailable:
            return otherwise

    def _call(self, ask: Callable[[], T]) -> T:
        try:
            return self._breaker.call(ask)
        except StoreUnavailable as error:
            if error.__cause__ is not None:  # it was tried
                self.stats.add(failures=1)
            raise
        except self._refusals as error:
            self.stats.add(failures=1)
            raise StoreUnavailable(f"{self.name} refuses: {error}") from error

    # --- reading ----------------------------------------------------------------------------------

    def _heads(self, keys: Sequence[str]) -> list[Head | None]:
        nothing: list[Bytes | None] = [None] * len(keys)
        blobs = self._ask(lambda: self._read_heads(keys), nothing)
        return [None if blob is None else self._head(key, blob) for key, blob in zip(keys, blobs, strict=True)]

    def _head(self, key: str, blob: Bytes) -> Head | None:
        try:
            return read_head(blob, key)
        except CorruptEntry as error:
            self._drop(key, error)
            return None

    def _whole(self, head: Head) -> ChunkKV | None:
        """All layers of an entry. One that is replaced while it is read is read once more."""
        for _ in range(2):
            try:
                return head.whole(self._layers(head, range(len(head.spans))).__getitem__)
            except StoreUnavailable:
                return None
            except CorruptEntry as error:
                newer = self._replaced(head, error)
            if newer is None:
                return None
            head = newer
        return None

    def _lazy(self, head: Head) -> ChunkKV:
        return head.kv.with_layers(_Ahead(self, head))

    def _layers(self, head: Head, indices: Sequence[int]) -> list[Bytes]:
        """Bytes of some layers.

        Raises:
            StoreUnavailable: no answer.
            CorruptEntry: one of them is not there.
        """
        blobs = self._call(lambda: self._read_layers(head, indices)) if indices else []
        found = [blob for blob in blobs if blob is not None]
        self.stats.add(bytes_read=sum(map(len, found)))
        if len(found) < len(indices):
            raise CorruptEntry(f"{len(indices) - len(found)} layers of entry {head.kv.key[:12]} are missing")
        return found

    def _replaced(self, head: Head, error: CorruptEntry) -> Head | None:
        """The head of a newer entry, where layers do not fit because there is one; else the entry is dropped."""
        newer = self._heads([head.kv.key])[0]
        if newer is not None and newer.digests == head.digests:
            self._drop(head.kv.key, error)
            return None
        return newer

    def _drop(self, key: str, error: CorruptEntry) -> None:
        count = "foreign" if isinstance(error, ForeignEntry) else "corrupt"
        self.stats.add(**{count: 1})
        self._ask(lambda: self._remove(key), False)


def without_secrets(url: str) -> str:
    """An address to show: without its password, and without its options, which may hold keys."""
    return re.sub(r":[^@/]*@", ":***@", url.partition("?")[0])


class _Ahead(LazyLayers):
    """Layers read when they are asked for, together with those behind them up to the store's ``ahead_bytes``."""

    def __init__(self, store: RemoteStore, head: Head) -> None:
        super().__init__(head, self._take)
        self._store = store
        self._lock = threading.Lock()
        self._waiting: dict[int, Bytes] = {}

    def layer(self, index: int) -> Pair:
        begin = time.perf_counter()
        try:
            pair = super().layer(index)
        except StoreUnavailable as error:
            raise CorruptEntry(f"layer {index} of entry {self.head.kv.key[:12]} cannot be read: {error}") from error
        except CorruptEntry as error:
            self._store._replaced(self.head, error)
            raise
        self._store.stats.add(read_seconds=time.perf_counter() - begin)
        return pair

    def _take(self, index: int) -> Bytes:
        with self._lock:
            if index not in self._waiting:
                run = self._run(index)
                # Whoever jumps about gives up what was fetched ahead: it is bounded that way.
                self._waiting = dict(zip(run, self._store._layers(self.head, run), strict=True))
            return self._waiting.pop(index)

    def _run(self, index: int) -> range:
        """As many layers from ``index`` on as fit into what is fetched ahead, at least one."""
        begin = self.head.spans[index][0]
        stop = index + 1
        while stop < len(self) and self.head.spans[stop][1] - begin <= self._store.ahead_bytes:
            stop += 1
        return range(index, stop)
