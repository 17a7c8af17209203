"""Where chunk KV is kept between requests."""

from blend.stores.base import Store
from blend.stores.memory import MemoryStore

__all__ = ["MemoryStore", "Store"]
