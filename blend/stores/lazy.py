"""Layers that are read when they are asked for. Knows nothing of where they come from."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeAlias, overload

from torch import Tensor

__all__ = ["LayerSequence", "Pair"]

Pair: TypeAlias = "tuple[Tensor, Tensor]"


class LayerSequence(Sequence["Pair"]):
    """A sequence of (keys, values) for which a subclass gives its length and reads one layer.

    Attributes:
        stored_bytes: what has to be read from a slow place for all layers; 0 where they are in memory.
    """

    stored_bytes: int = 0

    @abstractmethod
    def layer(self, index: int) -> Pair:
        """Layer ``index``, 0 or more and below the length."""

    @overload
    def __getitem__(self, index: int) -> Pair: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Pair, ...]: ...
    def __getitem__(self, index: int | slice) -> Pair | tuple[Pair, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(f"layer {index} of {len(self)}")
        return self.layer(index % len(self))
