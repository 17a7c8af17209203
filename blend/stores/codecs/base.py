"""A codec: one layer's keys and values to named arrays and back. Knows nothing of files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Codec", "LayerSpec"]


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
