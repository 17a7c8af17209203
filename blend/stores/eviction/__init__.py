"""Eviction policies, one file each."""

from blend.errors import StoreError
from blend.stores.eviction.base import Entry, EvictionQueue, Policy, Score
from blend.stores.eviction.lru import LRU

__all__ = ["LRU", "POLICIES", "Entry", "EvictionQueue", "Policy", "Score", "policy_by_name"]

POLICIES: dict[str, type[Policy]] = {"lru": LRU}
"""Policies by name."""


def policy_by_name(name: str) -> Policy:
    """A fresh policy of that name.

    Raises:
        StoreError: there is none; the message lists those there are.
    """
    if name not in POLICIES:
        raise StoreError(f"there is no eviction policy {name!r}: choose from {', '.join(POLICIES)}")
    return POLICIES[name]()
