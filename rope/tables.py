"""Angle tables: which angle a position turns each frequency by.

A table answers one question: the angles at given positions, rounded to fp32 exactly as the model rounds
them, handed out in fp64 so that differences of angles are exact. It does not know keys, layers or models.

Shape suffixes: ``T`` rows, ``F`` frequencies (half the rotary dims), ``P`` tabulated positions.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rope.errors import UnsupportedRotation

__all__ = ["BoundedTable", "FrequencyTable", "RegimeTable", "RopeTable", "SampledTable"]


class RopeTable(Protocol):
    """Angles by position. ``length`` is the number of rows of the forward pass that uses them."""

    @property
    def width(self) -> int:
        """Number of frequencies F; the rotation touches 2F dims."""
        ...

    def angles(self, positions_T: Tensor, length: int) -> Tensor:
        """Angles in radians, fp64 ``[T, F]``, at integer ``positions_T``."""
        ...

    def digest(self) -> bytes:
        """Identifies the table's numbers, for content keys."""
        ...


@dataclass(frozen=True)
class FrequencyTable:
    """angle = fp32(position * inv_freq): default, linear, llama3, yarn and proportional RoPE.

    Args:
        inv_freq_F: the model's own fp32 inverse frequencies, in radians per position.
    """

    inv_freq_F: Tensor

    @property
    def width(self) -> int:
        return self.inv_freq_F.numel()

    def angles(self, positions_T: Tensor, length: int) -> Tensor:
        inv_freq_F = self.inv_freq_F.to(positions_T.device)
        # The product is rounded to fp32 before it is widened: the key in the store was turned by that number.
        return (positions_T.float()[:, None] * inv_freq_F).double()

    def digest(self) -> bytes:
        return _digest("frequency", self.inv_freq_F)


@dataclass(frozen=True)
class RegimeTable:
    """Two frequency sets, chosen by the length of the pass (longrope; Ding et al. 2024, arXiv:2402.13753).

    Args:
        short: used while ``length <= switch``.
        long: used beyond.
        switch: the original context length, in rows.
    """

    short: FrequencyTable
    long: FrequencyTable
    switch: int

    @property
    def width(self) -> int:
        return self.short.width

    def angles(self, positions_T: Tensor, length: int) -> Tensor:
        table = self.long if length > self.switch else self.short
        return table.angles(positions_T, length)

    def digest(self) -> bytes:
        return _digest(f"regime{self.switch}", self.short.inv_freq_F, self.long.inv_freq_F)


@dataclass(frozen=True)
class BoundedTable:
    """A table that holds up to a length and is unusable beyond (dynamic NTK past its original context).

    Beyond it the model rescales every frequency with each longer call, so keys of two calls do not agree.
    """

    table: FrequencyTable
    limit: int

    @property
    def width(self) -> int:
        return self.table.width

    def angles(self, positions_T: Tensor, length: int) -> Tensor:
        """Raises :class:`UnsupportedRotation` when ``length`` passes the limit."""
        if length > self.limit:
            raise UnsupportedRotation(
                f"dynamic NTK RoPE rescales its frequencies beyond {self.limit} rows and this pass has {length}: "
                "cached keys cannot be moved. Use a shorter prompt, or the same model with yarn or linear scaling."
            )
        return self.table.angles(positions_T, length)

    def digest(self) -> bytes:
        return _digest(f"bounded{self.limit}", self.table.inv_freq_F)


@dataclass(frozen=True)
class SampledTable:
    """Angles read back from a model's precomputed sin/cos table (GPT-J, CodeGen).

    Args:
        angles_PF: fp64, ``atan2(sin, cos)`` of each tabulated position.
    """

    angles_PF: Tensor

    @property
    def width(self) -> int:
        return self.angles_PF.shape[1]

    def angles(self, positions_T: Tensor, length: int) -> Tensor:
        if length > self.angles_PF.shape[0]:
            raise UnsupportedRotation(
                f"the model tabulates {self.angles_PF.shape[0]} positions and this pass has {length} rows"
            )
        return self.angles_PF.to(positions_T.device)[positions_T]

    def digest(self) -> bytes:
        return _digest("sampled", self.angles_PF)


def _digest(kind: str, *tensors: Tensor) -> bytes:
    state = hashlib.sha256(kind.encode())
    for tensor in tensors:
        state.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return state.digest()
