"""Where chunk KV is kept between requests."""

from blend.stores.base import Store, StoreStats
from blend.stores.disk import DiskStore
from blend.stores.fsspec_store import FsspecStore
from blend.stores.memory import MemoryStore
from blend.stores.redis_store import RedisStore
from blend.stores.tiered import TieredStore
from blend.stores.url import open_store

__all__ = [
    "DiskStore",
    "FsspecStore",
    "MemoryStore",
    "RedisStore",
    "Store",
    "StoreStats",
    "TieredStore",
    "open_store",
]
