"""Opens stores by their address. Every mistake in one is a :class:`~blend.errors.StoreError` that says what may stand.

::

    memory://8GiB?policy=lru&codec=int8
    file:///kv?limit=100GiB&codec=int4+zstd        also file://relative/folder, and a plain path such as ~/kv
    redis://:password@host:6379/0?ttl=3600&limit=10GiB&namespace=mine        also rediss:// and unix://
    s3://bucket/kv?endpoint_url=http://host:9000        and whatever else fsspec opens
    memory://2GiB | file:///kv?limit=50GiB        tiers, fastest first
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote

from blend.errors import StoreError
from blend.stores.base import Store
from blend.stores.codecs import codec_by_name
from blend.stores.disk import DiskStore
from blend.stores.eviction import policy_by_name
from blend.stores.fsspec_store import FsspecStore
from blend.stores.memory import MemoryStore
from blend.stores.redis_store import RedisStore
from blend.stores.remote import without_secrets
from blend.stores.tiered import TieredStore

__all__ = ["open_store", "parse_size"]

Spec: TypeAlias = "str | os.PathLike[str] | Store"

_Options: TypeAlias = "Mapping[str, Callable[[str], Any]]"

_UNITS = {
    "B": 1,
    **{"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
    **{"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40},
}


def open_store(spec: Spec | Sequence[Spec]) -> Store:
    """The store at an address, or several as tiers.

    Args:
        spec: an address as above, a folder, an open store (handed back as it is), or a sequence of them, fastest first.

    Raises:
        StoreError: an address that cannot be; the message names the value and what is possible.
        StoreUnavailable: nobody answers there.
    """
    if isinstance(spec, Store):
        return spec
    if isinstance(spec, os.PathLike):
        return DiskStore(Path(spec).expanduser())
    if isinstance(spec, str) and "|" not in spec:
        return _open(spec.strip())
    parts: Sequence[Spec] = spec.split("|") if isinstance(spec, str) else spec
    tiers: list[Store] = []
    try:
        for part in parts:
            tiers.append(open_store(part))  # noqa: PERF401  # those that opened are closed if a later one does not
        return TieredStore(tiers)
    except BaseException:
        for tier in tiers:
            if tier not in parts:  # the caller's own stays as it is
                tier.close()
        raise


def parse_size(text: str) -> int:
    """Bytes of a size such as ``512MiB``, ``8GiB``, ``10GB`` or ``1048576``.

    Raises:
        StoreError: it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    size = int(float(match[1]) * units.get(match[2].lower() or "b", 0)) if match else 0
    if size <= 0:
        raise StoreError(f"{text!r} is no size: write a positive number of bytes, or one with a unit: "
                         f"{', '.join(_UNITS)} (8GiB)")  # fmt: skip
    return size


def _open(address: str) -> Store:
    if not address:
        raise StoreError(
            "an empty address opens no store: write memory://8GiB, file:///folder, redis://host or s3://bucket"
        )
    scheme, found, rest = address.partition("://")
    if not found:  # a plain path
        scheme, rest = "file", address
    place, _, query = rest.partition("?")
    match scheme.lower():
        case "memory":
            options = _parsed(address, query, {"policy": _policy, "codec": _codec})
            return MemoryStore(parse_size(unquote(place)), **options) if place else MemoryStore(**options)
        case "file":
            known: _Options = {"limit": parse_size, "codec": _codec, "policy": _policy, "sync": _flag}
            options = _parsed(address, query, known)
            if not place:
                raise StoreError(
                    f"{without_secrets(address)} names no folder: write file:///absolute/folder or file://relative/folder"
                )
            return DiskStore(Path(unquote(place)).expanduser(), **options)
        case "redis" | "rediss" | "unix":
            known = {"ttl": _seconds, "limit": parse_size, "namespace": str, "codec": _codec, "part_bytes": parse_size}
            return RedisStore(f"{scheme}://{place}", **_parsed(address, query, known))
    _known_to_fsspec(scheme)
    options = _parsed(address, query, {"limit": parse_size, "codec": _codec}, others=_plain)
    return FsspecStore(f"{scheme}://{unquote(place)}", **options)


def _parsed(address: str, query: str, known: _Options, others: Callable[[str], Any] | None = None) -> dict[str, Any]:
    """The query as arguments. A plus means a plus: codecs have it in their names."""
    options: dict[str, Any] = {}
    for item in filter(None, query.split("&")):
        name, _, value = (unquote(part) for part in item.partition("="))
        parse = known.get(name, others)
        if parse is None:
            raise StoreError(
                f"there is no option {name!r} in {without_secrets(address)}: choose from {', '.join(known)}"
            )
        if name in options:
            raise StoreError(f"the option {name!r} stands twice in {without_secrets(address)}: leave one")
        try:
            options[name] = parse(value)
        except ValueError as error:
            raise StoreError(f"{name}={value} in {without_secrets(address)}: {error}") from error
    return options


def _known_to_fsspec(scheme: str) -> None:
    from fsspec.registry import available_protocols

    if scheme.split("::")[0] not in available_protocols():
        raise StoreError(f"no store opens {scheme!r}://: choose from memory, file, redis, rediss, unix, or what fsspec "
                         f"opens: {', '.join(sorted(available_protocols()))}")  # fmt: skip


def _codec(text: str) -> str:
    return codec_by_name(text).name


def _policy(text: str) -> str:
    return policy_by_name(text).name


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("write seconds, such as 3600") from None


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("write true or false")
    return text.lower() == "true"


def _plain(text: str) -> Any:
    return text.lower() == "true" if text.lower() in ("true", "false") else text
