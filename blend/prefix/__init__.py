"""The plain, exact prefix path."""

from blend.prefix.base import PrefixCache, PrefixHit, PrefixStats
from blend.prefix.blocks import BlockPrefixCache
from blend.prefix.linear import LinearPrefixCache
from blend.prefix.radix import RadixPrefixCache

__all__ = ["BlockPrefixCache", "LinearPrefixCache", "PrefixCache", "PrefixHit", "PrefixStats", "RadixPrefixCache"]
