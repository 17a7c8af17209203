"""A store in the process's own memory. Knows nothing of files."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from blend.chunk import ChunkKV
from blend.errors import BudgetError, StoreUnavailable
from blend.stores.base import Store
from blend.stores.codecs import Codec, LayerSpec, codec_by_name
from blend.stores.eviction import EvictionQueue, Policy, policy_by_name
from blend.stores.lazy import LayerSequence, Pair

__all__ = ["MemoryStore"]


class MemoryStore(Store):
    """Keeps at most ``limit`` bytes; what the policy thinks least of leaves first.

    Tensors stay on the device they come from, unless a codec or ``pin_memory`` brings them to the host.

    Args:
        limit: bytes of keys and values, as they are kept.
        policy: who leaves first, by name or as an object of this store's own.
        codec: what entries are kept as; they are decoded at every read. ``none`` keeps the tensors as they are.
        pin_memory: keep them in page-locked host memory, from which copies to a GPU are fast and may overlap with
            computing.

    Raises:
        BudgetError: the limit is not positive.
        StoreError: there is no such policy or codec.
        StoreUnavailable: ``pin_memory`` without CUDA.
    """

    def __init__(
        self,
        limit: int = 4 << 30,
        *,
        policy: Policy | str = "lru",
        codec: Codec | str = "none",
        pin_memory: bool = False,
    ) -> None:
        if limit <= 0:
            raise BudgetError(f"limit is {limit} bytes: a memory store needs a positive one, such as 4 << 30")
        if pin_memory and not torch.cuda.is_available():
            raise StoreUnavailable("pin_memory needs CUDA, and there is none here: leave it out")
        self.limit = limit
        self._codec = codec_by_name(codec) if isinstance(codec, str) else codec
        self.codec = self._codec.name
        self._pin_memory = pin_memory
        self._queue = EvictionQueue(policy_by_name(policy) if isinstance(policy, str) else policy)
        self._entries: dict[str, _Held] = {}
        self._pinned: set[str] = set()
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return self._queue.nbytes

    def get(self, key: str) -> ChunkKV | None:
        held = self._find(key)
        return None if held is None else self._decoded(held)

    def get_many(self, keys: Sequence[str], *, layerwise: bool = False) -> list[ChunkKV | None]:
        if not layerwise:
            return [self.get(key) for key in keys]
        found = (self._find(key) for key in keys)
        return [None if held is None else held.kv for held in found]

    def put(self, kv: ChunkKV) -> bool:
        held = self._held(kv) if kv.nbytes <= self.limit or self.codec != "none" else None
        with self._lock:
            if held is None or not self._make_room(kv.key, held.nbytes):
                self.stats.add(refused=1)
                return False
            self._entries[kv.key] = held
            self._queue.add(kv.key, held.nbytes, kv.retention)
        return True

    def delete(self, key: str) -> bool:
        with self._lock:
            self._queue.remove(key)
            self._pinned.discard(key)
            return self._entries.pop(key, None) is not None

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def keys(self) -> Iterator[str]:
        with self._lock:
            return iter(list(self._entries))

    def pin(self, key: str) -> bool:
        with self._lock:
            if not self._queue.pin(key):
                return False
            self._pinned.add(key)
            return True

    def unpin(self, key: str) -> bool:
        with self._lock:
            if not self._queue.pin(key, -1):
                return False
            if not self._pins(key):
                self._pinned.discard(key)
            return True

    def _find(self, key: str) -> _Held | None:
        with self._lock:
            held = self._entries.get(key)
            if held is not None:
                self._queue.use(key)
        if held is None:
            self.stats.add(misses=1)
        else:
            self.stats.add(hits=1, bytes_read=held.nbytes)
        return held

    def _make_room(self, key: str, nbytes: int) -> bool:
        """Evicts until ``nbytes`` fit in place of what ``key`` holds now; False, and nothing left, if they never will.

        What ``key`` itself holds leaves like any other entry, unless it is pinned.
        """
        others = sum(entry.nbytes for entry in map(self._queue.get, self._pinned - {key}) if entry is not None)
        if others + nbytes > self.limit:
            return False
        while self.nbytes - self._size(key) + nbytes > self.limit:
            victim = self._queue.evict()
            assert victim is not None, "what is not pinned can be evicted"
            del self._entries[str(victim.key)]
            self.stats.add(evicted=1)
        return True

    def _size(self, key: str) -> int:
        entry = self._queue.get(key)
        return 0 if entry is None else entry.nbytes

    def _pins(self, key: str) -> int:
        entry = self._queue.get(key)
        return 0 if entry is None else entry.pins

    def _held(self, kv: ChunkKV) -> _Held:
        """A copy: what the caller does with its tensors later must not reach the store."""
        if self.codec == "none":
            layers = tuple((self._own(keys), self._own(values)) for keys, values in kv.layers)
            return _Held(kv.with_layers(layers), kv.nbytes)
        encoded, nbytes = [], 0
        for keys, values in kv.layers:
            parts = {name: self._own(part) for name, part in self._codec.encode(keys, values).items()}
            nbytes += sum(part.numel() * part.element_size() for part in parts.values())
            encoded.append((parts, LayerSpec.of(keys, values)))
        return _Held(kv.with_layers(_Encoded(self._codec, encoded)), nbytes)

    def _own(self, tensor: Tensor) -> Tensor:
        if self._pin_memory:
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
        return tensor.clone(memory_format=torch.contiguous_format)

    def _decoded(self, held: _Held) -> ChunkKV:
        if self.codec == "none":
            return held.kv
        begin = time.perf_counter()
        kv = held.kv.with_layers(tuple(held.kv.layers))
        self.stats.add(read_seconds=time.perf_counter() - begin)
        return kv


class _Held(NamedTuple):
    """An entry and the bytes that it is kept in."""

    kv: ChunkKV
    nbytes: int


class _Encoded(LayerSequence):
    """Layers that are decoded at each access."""

    def __init__(self, codec: Codec, layers: list[tuple[dict[str, Tensor], LayerSpec]]) -> None:
        self._codec = codec
        self._layers = layers

    def __len__(self) -> int:
        return len(self._layers)

    def layer(self, index: int) -> Pair:
        return self._codec.decode(*self._layers[index])
