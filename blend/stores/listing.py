"""What lies in a store, told from the heads of its entries. Knows no kind of store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable

from blend.stores.base import Store
from blend.stores.entry import LazyLayers

__all__ = ["Listed", "Peeks", "listing"]


class Listed(NamedTuple):
    """One entry.

    Attributes:
        key: its content key.
        fingerprint: of the model that it is of; None where it is of another format version, or damaged.
        codec: name of the codec that it is written in; "" where that cannot be told.
        nbytes: bytes it takes, as far as they can be told.
    """

    key: str
    fingerprint: str | None
    codec: str
    nbytes: int


@runtime_checkable
class Peeks(Protocol):
    """A store that can tell of an entry without reading more than its head, and without removing what is damaged."""

    def peek(self, key: str) -> Listed | None:
        """The entry, or None where there is none."""


def listing(store: Store) -> Iterator[Listed]:
    """All entries, in no order.

    A store that does not :class:`peek <Peeks>` is asked for their heads. As at every read, those that are damaged or of
    another format version are then removed; they are listed all the same.
    """
    for key in store.keys():  # noqa: SIM118  # a store is no dict
        found = store.peek(key) if isinstance(store, Peeks) else _asked(store, key)
        if found is not None:
            yield found


def _asked(store: Store, key: str) -> Listed | None:
    before = store.stats.corrupt + store.stats.foreign
    (kv,) = store.get_many([key], layerwise=True)
    if kv is None:
        dropped = store.stats.corrupt + store.stats.foreign > before
        return Listed(key, None, "", 0) if dropped else None
    if isinstance(kv.layers, LazyLayers):
        head = kv.layers.head
        return Listed(key, kv.fingerprint, head.codec.name, head.size)
    return Listed(key, kv.fingerprint, store.codec, kv.nbytes)
