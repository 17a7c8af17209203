"""Eviction policies, one file each."""

from blend.errors import StoreError
from blend.stores.eviction.base import Entry, EvictionQueue, Policy, Score
from blend.stores.eviction.gdsf import GDSF
from blend.stores.eviction.hotness import Hotness
from blend.stores.eviction.lru import LRU
from blend.stores.eviction.priority import Priority
from blend.stores.eviction.random import Random

__all__ = [
    "GDSF",
    "LRU",
    "POLICIES",
    "Entry",
    "EvictionQueue",
    "Hotness",
    "Policy",
    "Priority",
    "Random",
    "Score",
    "policy_by_name",
]

POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (LRU, Hotness, Priority, GDSF, Random)}
"""Policies by name."""


def policy_by_name(name: str) -> Policy:
    """A fresh policy of that name.

    Raises:
        StoreError: there is none; the message lists those there are.
    """
    if name not in POLICIES:
        raise StoreError(f"there is no eviction policy {name!r}: choose from {', '.join(POLICIES)}")
    return POLICIES[name]()
