"""Removes what no model here can use any more: entries of replaced models, and of other format versions."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from blend.stores.base import Store
from blend.stores.listing import listing

__all__ = ["Pruned", "prune"]


class Pruned(NamedTuple):
    """What a pruning did, or would do.

    Attributes:
        kept: entries of the models that stay.
        removed: entries of other models.
        unusable: entries of another format version, or damaged; removed, too.
        freed_bytes: bytes that all those took.
    """

    kept: int
    removed: int
    unusable: int
    freed_bytes: int


def prune(store: Store, keep: Collection[str], *, dry_run: bool = False) -> Pruned:
    """Removes entries whose fingerprint is not in ``keep``. Only heads are read.

    A model update changes its fingerprint. Its old entries are never used again, and take room until they are evicted,
    or pruned.

    Args:
        keep: fingerprints (``Blender.setup.fingerprint``) of the models whose entries stay.
        dry_run: only count. (A store that is no :class:`~blend.stores.listing.Peeks` drops damaged entries, and those
            of another format version, all the same: it does so whenever it is made to read one.)
    """
    kept = removed = unusable = freed = 0
    for entry in listing(store):
        if entry.fingerprint in keep:
            kept += 1
            continue
        removed += entry.fingerprint is not None
        unusable += entry.fingerprint is None
        freed += entry.nbytes
        if not dry_run:
            store.delete(entry.key)
    return Pruned(kept, removed, unusable, freed)
