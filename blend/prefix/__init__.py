"""The plain, exact prefix path."""

from blend.prefix.base import PrefixCache, PrefixHit, PrefixStats
from blend.prefix.linear import LinearPrefixCache

__all__ = ["LinearPrefixCache", "PrefixCache", "PrefixHit", "PrefixStats"]
