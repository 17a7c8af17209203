"""How KV is written: as it is, rounded, or compressed."""

from blend.errors import StoreError
from blend.stores.codecs.base import Codec, LayerSpec
from blend.stores.codecs.plain import Plain

__all__ = ["CODECS", "Codec", "LayerSpec", "Plain", "codec_by_name"]

CODECS: dict[str, type[Codec]] = {"none": Plain}
"""Codecs by name."""


def codec_by_name(name: str) -> Codec:
    """The codec of that name.

    Raises:
        StoreError: there is none; the message lists those there are.
    """
    if name not in CODECS:
        raise StoreError(f"there is no codec {name!r}: choose from {', '.join(CODECS)}")
    return CODECS[name]()
