"""A codec: one layer's keys and values to named arrays and back. Knows nothing of files."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from blend.chunk import KVLayers

__all__ = ["Codec", "LayerSpec", "Side", "SideCodec"]

Side: TypeAlias = Literal["key", "value"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class LayerSpec(NamedTuple):
    """Shapes and dtypes of one layer's keys and values, as they come out of decoding."""

    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    key_dtype: torch.dtype
    value_dtype: torch.dtype

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> LayerSpec:
        """The spec of a layer in hand."""
        return cls(tuple(keys.shape), tuple(values.shape), keys.dtype, values.dtype)


class Codec(ABC):
    """Encodes each layer alone, so that layers can be read one by one.

    Attributes:
        name: stands in every key and header; what it means never changes.
        lossless: decoding gives the very bits back.
    """

    name: str
    lossless: bool = False

    @property
    def loss(self) -> str:
        """What is lost, by name: part of the keys of entries, so that codecs of the same loss share them."""
        return "none" if self.lossless else self.name

    def round_trip(self, layers: KVLayers) -> KVLayers:
        """Layers as they come out again."""
        if self.lossless:
            return layers
        return tuple(self.decode(self.encode(k, v), LayerSpec.of(k, v)) for k, v in layers)

    @abstractmethod
    def encode(self, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        """Arrays by name, on the CPU, of any dtype that safetensors knows; their order is the order in the file.

        Args:
            keys: ``[H, n, Dk]``, on any device, maybe a view.
            values: ``[H, n, Dv]``.
        """

    @abstractmethod
    def decode(self, parts: Mapping[str, Tensor], spec: LayerSpec) -> tuple[Tensor, Tensor]:
        """Keys and values as ``spec`` describes them.

        Args:
            parts: what :meth:`encode` gave, never to be written to.
        """


class SideCodec(Codec):
    """A lossy codec that treats keys and values one after the other, each as one tensor.

    A side is stored as it is, under its bare name, where rounding it would do harm: it holds NaN or infinity, it is
    empty, its range is too much for the codec, or its dtype is no ordinary floating one. Otherwise its arrays are
    called ``key.*`` and ``value.*``.
    """

    @abstractmethod
    def encode_side(self, side: Side, x_HnD: Tensor) -> dict[str, Tensor] | None:
        """Arrays by name; None to have the side stored as it is.

        Args:
            x_HnD: finite, not empty, of a floating dtype, on any device.
        """

    @abstractmethod
    def decode_side(self, side: Side, parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        """The side again, of any floating dtype, finite; shape ``[H, n, D]``."""

    def encode(self, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        arrays: dict[str, Tensor] = {}
        sides: tuple[tuple[Side, Tensor], ...] = (("key", keys), ("value", values))
        for side, x in sides:
            parts = self.encode_side(side, x.detach()) if _sound(x) else None
            named = {side: x} if parts is None else {f"{side}.{name}": part for name, part in parts.items()}
            arrays |= {name: part.cpu() for name, part in named.items()}
        # In a file, one after another, each begins where numbers of its width may.
        return dict(sorted(arrays.items(), key=lambda item: -item[1].element_size()))

    def decode(self, parts: Mapping[str, Tensor], spec: LayerSpec) -> tuple[Tensor, Tensor]:
        keys = self._decoded("key", parts, spec.key_shape, spec.key_dtype)
        return keys, self._decoded("value", parts, spec.value_shape, spec.value_dtype)

    def _decoded(self, side: Side, parts: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if side in parts:
            return parts[side]
        own = {name.removeprefix(f"{side}."): part for name, part in parts.items() if name.startswith(f"{side}.")}
        x = self.decode_side(side, own, shape)
        # An error of half a step must not carry a number next to the largest of its dtype over the edge.
        top = torch.finfo(dtype).max
        return x.to(torch.promote_types(x.dtype, dtype)).clamp(-top, top).to(dtype).contiguous()


def _sound(x: Tensor) -> bool:
    """Whether ``x`` is of numbers only: NaN and infinities show in the extremes."""
    return x.numel() > 0 and x.dtype in _DTYPES and all(map(math.isfinite, map(float, x.aminmax())))
