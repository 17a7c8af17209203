"""No codec at all: the very bits."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from blend.stores.codecs.base import Codec, LayerSpec

__all__ = ["Plain"]


class Plain(Codec):
    """Keys and values as they are."""

    name = "none"
    lossless = True

    def encode(self, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        return {"key": keys.cpu(), "value": values.cpu()}

    def decode(self, parts: Mapping[str, Tensor], spec: LayerSpec) -> tuple[Tensor, Tensor]:
        return parts["key"], parts["value"]
