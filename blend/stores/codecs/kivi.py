"""Integers of 8 or 4 bits, with the axes of KIVI (arXiv 2402.02750).

Keys have channels that are large in every row, so each channel has scales of its own, over groups of rows. Values have
no such channels, but rows of different size: each row has scales of its own, over groups of channels. Within a group
the integers are evenly spaced from its smallest number to its largest one.

Groups are cut evenly: 130 rows in groups of about 64 are two groups of 65, not 64, 64 and 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from blend.stores.codecs.base import Side, SideCodec

__all__ = ["Int4", "Int8"]


class _Kivi(SideCodec):
    """Arrays of a side: ``codes`` (uint8), ``scales`` (bf16 ``[2, lines, groups]``: smallest number, spacing).

    The error is at most half a spacing; at the ends of a group's range, another half or what a cast to bf16 would cost.

    Attributes:
        bits: per number.
        groups: how many rows of a key channel, and how many channels of a row of values, share a scale; about.
    """

    bits: int
    groups: Mapping[Side, int]

    def encode_side(self, side: Side, x_HnD: Tensor) -> dict[str, Tensor] | None:
        lines = _lines(side, x_HnD).float()
        grouped = _grouped(lines, self.groups[side])
        low = grouped.amin(-1).bfloat16()
        spacing = ((grouped.amax(-1) - low.float()) / (2**self.bits - 1)).bfloat16()
        if not (low.isfinite().all() and spacing.isfinite().all()):
            return None
        divisor = spacing.float().where(spacing > 0, 1.0)  # all numbers alike: every code is 0
        codes = ((grouped - low.float()[..., None]) / divisor[..., None]).round().clamp(0, 2**self.bits - 1)
        flat = codes.to(torch.uint8).flatten(1)[:, : lines.shape[1]].reshape(-1)
        return {"codes": flat if self.bits == 8 else _pack(flat), "scales": torch.stack([low, spacing])}

    def decode_side(self, side: Side, parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        heads, rows, width = shape
        count, length = (heads * width, rows) if side == "key" else (rows, heads * width)
        flat = parts["codes"] if self.bits == 8 else _unpack(parts["codes"], count * length)
        low, spacing = parts["scales"].float()[..., None]
        grouped = _grouped(flat.reshape(count, length).float(), self.groups[side])
        lines = (grouped * spacing + low).flatten(1)[:, :length]
        return _from_lines(side, lines, heads)


class Int8(_Kivi):
    """8 bits a number, and 0.1 to 0.3 for the scales."""

    name = "int8"
    bits = 8
    groups = MappingProxyType({"key": 256, "value": 256})


class Int4(_Kivi):
    """4 bits a number, and about half a bit for the scales."""

    name = "int4"
    bits = 4
    groups = MappingProxyType({"key": 64, "value": 128})


def _lines(side: Side, x_HnD: Tensor) -> Tensor:
    """The numbers that may share scales, in lines: keys ``[H D, n]``, values ``[n, H D]``."""
    return x_HnD.transpose(1, 2).flatten(0, 1) if side == "key" else x_HnD.transpose(0, 1).flatten(1)


def _from_lines(side: Side, lines: Tensor, heads: int) -> Tensor:
    """Lines as ``[H, n, D]`` again."""
    x_HnD: Tensor = (
        lines.unflatten(0, (heads, -1)).transpose(1, 2)
        if side == "key"
        else lines.unflatten(1, (heads, -1)).transpose(0, 1)
    )
    return x_HnD


def _grouped(lines: Tensor, group: int) -> Tensor:
    """``[lines, length]`` to ``[lines, groups, size]``, the last number repeated where a group is not full."""
    length = lines.shape[1]
    count = max(1, round(length / group))
    size = -(-length // count)
    missing = count * size - length
    full = F.pad(lines[None], (0, missing), mode="replicate")[0] if missing else lines
    grouped: Tensor = full.unflatten(1, (count, size))
    return grouped


def _pack(codes: Tensor) -> Tensor:
    """Two codes of 4 bits a byte, the first one in the low half."""
    even = F.pad(codes, (0, len(codes) % 2))
    packed: Tensor = even[0::2] | even[1::2] << 4
    return packed


def _unpack(packed: Tensor, count: int) -> Tensor:
    return torch.stack([packed & 15, packed >> 4], 1).reshape(-1)[:count]
