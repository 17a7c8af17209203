"""A store on a Redis server, shared by every process that can reach it.

::

    kvblend:entry:KEY   hash: a field "0.0" per layer (and "0.1" ... where it is larger than a part), and "head"
    kvblend:order       sorted set: keys by last use
    kvblend:sizes       hash: bytes by key
    kvblend:state       hash: bytes of all entries, and the number of the last use

An entry is one key of the server, which therefore expires, evicts, replaces and removes it as a whole.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from blend.errors import StoreError, StoreUnavailable
from blend.stores.codecs import Codec
from blend.stores.entry import Bytes, Head, Packed
from blend.stores.remote import RemoteStore, without_secrets

if TYPE_CHECKING:
    import redis

__all__ = ["RedisStore"]

# The scripts below share these keys: KEYS = order, sizes, state. ARGV[1] is what an entry's name begins with.
_FORGET = """
local function forget(key)
  local size = redis.call('HGET', KEYS[2], key)
  if size then
    redis.call('HDEL', KEYS[2], key)
    redis.call('ZREM', KEYS[1], key)
    redis.call('HINCRBY', KEYS[3], 'bytes', -size)
  end
end
"""

# ARGV[2..]: keys. Books a use of those that are there, and forgets those that expired.
_USE = f"""{_FORGET}
for i = 2, #ARGV do
  if redis.call('EXISTS', ARGV[1] .. ARGV[i]) == 1 then
    redis.call('ZADD', KEYS[1], 'XX', redis.call('HINCRBY', KEYS[3], 'clock', 1), ARGV[i])
  else
    forget(ARGV[i])
  end
end
"""

# ARGV[2]: key, [3]: its bytes, [4]: limit or 0. Books an entry and makes room; says how many entries had to go. Each
# call also looks at the eight longest unused ones, so that what expired does not stay booked.
_ADMIT = f"""{_FORGET}
forget(ARGV[2])
for _, key in ipairs(redis.call('ZRANGE', KEYS[1], 0, 7)) do
  if redis.call('EXISTS', ARGV[1] .. key) == 0 then forget(key) end
end
local limit, gone = tonumber(ARGV[4]), 0
while limit > 0 and tonumber(redis.call('HGET', KEYS[3], 'bytes') or 0) + ARGV[3] > limit do
  local key = redis.call('ZRANGE', KEYS[1], 0, 0)[1]
  if not key then break end
  gone = gone + redis.call('UNLINK', ARGV[1] .. key)
  forget(key)
end
redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
redis.call('ZADD', KEYS[1], redis.call('HINCRBY', KEYS[3], 'clock', 1), ARGV[2])
redis.call('HINCRBY', KEYS[3], 'bytes', ARGV[3])
return gone
"""

# ARGV[2]: key. Removes an entry; says whether there was one.
_REMOVE = f"""{_FORGET}
forget(ARGV[2])
return redis.call('UNLINK', ARGV[1] .. ARGV[2])
"""


_REPLY = 1 << 20
"""Bytes worth asking for at once: the library's reader, in Python, takes three times as long over a few MB."""


class RedisStore(RemoteStore):
    """Keeps entries on a Redis server (6 or later). Needs the extra ``redis``: ``pip install 'kvblend[redis]'``.

    Writing is one transaction, reading one round trip for all heads and one for the layers of an entry. What the server
    drops by itself (``maxmemory``, with a policy that may drop these keys) is simply a miss; the bookkeeping of
    ``limit`` must not be dropped, so set either the one or the other.

    Args:
        url: ``redis://[[user]:password@]host[:port][/db]``, ``rediss://`` (TLS) or ``unix://path``.
        namespace: what all keys on the server begin with.
        limit: bytes of entries as stored in this namespace, all clients together; least recently used out first. None
            for no limit.
        ttl: seconds that an entry lives after it was written; None for ever.
        codec: what entries are written as; each is read as what it was written.
        part_bytes: larger layers are cut into parts of this size.
        client: a ``redis.Redis`` to use in place of one made from ``url``, for settings that no URL has.
        clock: seconds, for the pauses after a failure.

    Raises:
        BudgetError: the limit is not positive.
        StoreError: an argument that cannot be, or the extra is not installed.
        StoreUnavailable: no server answers there, or it wants another password.
    """

    def __init__(
        self,
        url: str,
        *,
        namespace: str = "kvblend",
        limit: int | None = None,
        ttl: float | None = None,
        codec: Codec | str = "none",
        part_bytes: int = 4 << 20,
        client: redis.Redis | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not re.fullmatch(r"[\w.:-]+", namespace):
            raise StoreError(f"namespace {namespace!r}: use letters, digits and any of _ . : -")
        if ttl is not None and not 0.001 <= ttl < 1e9:
            raise StoreError(f"ttl is {ttl} seconds: give a positive number, or None for entries that stay")
        if part_bytes < 1:
            raise StoreError(f"part_bytes is {part_bytes}: give a positive number, such as 4 << 20")
        name = without_secrets(url)
        self._redis = _library()
        errors, refusals = (self._redis.RedisError, OSError), (self._redis.ResponseError,)
        super().__init__(name, limit=limit, codec=codec, errors=errors, refusals=refusals, clock=clock)
        self._ttl = ttl
        self._part_bytes = part_bytes
        self._entry = f"{namespace}:entry:"
        self._books = tuple(f"{namespace}:{book}" for book in ("order", "sizes", "state"))
        self._owns_client = client is None
        self._client: Any = client or _connect(url, name)
        self._open()

    def close(self) -> None:
        if self._owns_client:
            self._client.close()

    def _open(self) -> None:
        if self._client.get_connection_kwargs().get("decode_responses"):
            raise StoreError("the client decodes responses to text: make it with decode_responses=False")
        try:
            self._client.ping()
        except (self._redis.AuthenticationError, self._redis.ResponseError) as error:
            raise StoreUnavailable(f"{self.name} refuses: {error}. Its URL is redis://user:password@host") from error
        except (self._redis.RedisError, OSError) as error:
            raise StoreUnavailable(
                f"no Redis answers at {self.name} ({error}): start one there (redis-server), or correct the address"
            ) from error

    # --- transport --------------------------------------------------------------------------------

    def _read_heads(self, keys: Sequence[str]) -> list[Bytes | None]:
        with self._client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.hget(self._entry + key, "head")
            if self.limit is not None:
                self._script(pipe, _USE, *keys)
            return [self._value(answer) for answer in pipe.execute(raise_on_error=False)[: len(keys)]]

    def _read_layers(self, head: Head, indices: Sequence[int]) -> list[Bytes | None]:
        sizes = [head.spans[i][1] - head.spans[i][0] for i in indices]
        blobs = self._read_parts(head.kv.key, indices, sizes, self._part_bytes)
        for at, (index, size) in enumerate(zip(indices, sizes, strict=True)):
            if len(blobs[at] or b"") != size:  # a client with another part size wrote it; its first part tells which
                first = self._client.hget(self._entry + head.kv.key, _field(index, 0))
                if first:
                    blobs[at] = self._read_parts(head.kv.key, [index], [size], len(first))[0]
        return blobs

    def _read_parts(self, key: str, indices: Sequence[int], sizes: Sequence[int], part: int) -> list[Bytes | None]:
        counts = [max(1, -(-size // part)) for size in sizes]
        fields = [_field(i, number) for i, count in zip(indices, counts, strict=True) for number in range(count)]
        step = max(1, _REPLY // max(1, *(min(part, size) for size in sizes)))
        values: list[bytes | None] = []
        for at in range(0, len(fields), step):
            values += self._client.hmget(self._entry + key, fields[at : at + step])
        parts = iter(values)
        return [_joined([next(parts) for _ in range(count)]) for count in counts]

    def _write(self, key: str, packed: Packed) -> bool:
        fields: dict[str, Bytes] = {}
        for index, layer in enumerate(packed.layers):
            view = memoryview(layer)
            for part, at in enumerate(range(0, max(1, len(layer)), self._part_bytes)):
                fields[_field(index, part)] = view[at : at + self._part_bytes]
        fields["head"] = packed.head
        try:
            with self._client.pipeline(transaction=True) as pipe:
                pipe.unlink(self._entry + key)
                self._script(pipe, _ADMIT, key, packed.nbytes, self.limit or 0)
                pipe.hset(self._entry + key, mapping=fields)
                if self._ttl is not None:
                    pipe.pexpire(self._entry + key, int(self._ttl * 1000))
                gone = pipe.execute()[1]
        except self._redis.OutOfMemoryError:
            self.stats.add(refused=1)
            return False
        self.stats.add(evicted=gone)
        return True

    def _remove(self, key: str) -> bool:
        return bool(self._script(self._client, _REMOVE, key))

    def _has(self, key: str) -> bool:
        return bool(self._client.exists(self._entry + key))

    def _list(self) -> list[str]:
        names = self._client.scan_iter(match=f"{self._entry}*", count=1000)
        return list(dict.fromkeys(name.decode()[len(self._entry) :] for name in names))

    def _value(self, answer: Any) -> Bytes | None:
        if not isinstance(answer, Exception):
            return cast("bytes | None", answer)
        if str(answer).startswith("WRONGTYPE"):
            return b""  # not a hash, and so no entry: found damaged, it is removed
        raise answer

    def _script(self, client: Any, script: str, *args: Any) -> Any:
        # Not by hash: a restarted server knows none, and a transaction cannot ask first.
        return client.eval(script, len(self._books), *self._books, self._entry, *args)


def _field(layer: int, part: int) -> str:
    return f"{layer}.{part}"


def _joined(parts: list[bytes | None]) -> Bytes | None:
    if len(parts) == 1:
        return parts[0]
    return None if None in parts else b"".join(part for part in parts if part is not None)


def _library() -> Any:
    try:
        import redis
    except ImportError as error:
        raise StoreError("a Redis store needs the extra redis: pip install 'kvblend[redis]'") from error
    return redis


def _connect(url: str, name: str) -> Any:
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    # One try more, at once, where a connection broke: after a restart of the server those in the pool are dead.
    retry = Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,))
    try:
        return redis.Redis.from_url(
            url, socket_connect_timeout=1.0, socket_timeout=5.0, retry=retry, socket_read_size=_REPLY
        )
    except ValueError as error:
        raise StoreError(f"{name} is no address of a Redis server ({error}): use redis://host:port/db") from error
