"""How KV is written: as it is, rounded, or compressed."""

from __future__ import annotations

from collections.abc import Callable

from blend.errors import StoreError
from blend.stores.codecs.base import Codec, LayerSpec, Side, SideCodec
from blend.stores.codecs.cast import BFloat16, Float16
from blend.stores.codecs.dct import Dct
from blend.stores.codecs.kivi import Int4, Int8
from blend.stores.codecs.plain import Plain
from blend.stores.codecs.zstd import Zstd

__all__ = ["CODECS", "Codec", "LayerSpec", "Plain", "Side", "SideCodec", "Zstd", "codec_by_name"]

CODECS: dict[str, Callable[[], Codec]] = {
    "none": Plain,
    "bf16": BFloat16,
    "fp16": Float16,
    "int8": Int8,
    "int4": Int4,
    "dct": Dct,
    "zstd": Zstd,
}
"""Codecs by name. ``+zstd`` behind a name squeezes what that codec writes."""

_ZSTD = "+zstd"


def codec_by_name(name: str) -> Codec:
    """The codec of that name, such as ``int4`` or ``int4+zstd``.

    Raises:
        StoreError: there is none; the message lists those there are.
    """
    first = name.removesuffix(_ZSTD)
    if first not in CODECS or name in (f"none{_ZSTD}", f"zstd{_ZSTD}"):
        raise StoreError(
            f"there is no codec {name!r}: choose from {', '.join(CODECS)}; all but none and zstd may be followed by "
            f"{_ZSTD}, as in int4{_ZSTD}"
        )
    return Zstd(CODECS[first]()) if name.endswith(_ZSTD) else CODECS[first]()
