"""How one set of rows is put to flash-attn: which are side by side, and what the blocks of the others share.

The same for all layers of one reach. Knows positions, and no keys. Shape suffixes as in :mod:`.flash`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from blend.hf.attention.bounds import first_seen, row_blocks
from blend.hf.attention.mask import Reach

__all__ = ["BLOCK", "FlashPlan", "Runs", "Singles"]

BLOCK = 128  # rows of the kernel's tile
LONG_RUN = 64  # rows side by side that are worth a sequence of their own


class Runs(NamedTuple):
    """Rows side by side: their places among the selected ones, and of each run where it begins and ends.

    Attributes:
        cu_rows_R: rows before each run, and all of them.
        starts_R: first key, where chunks cut them off.
        ends_R: row behind the last.
        longest: rows.
        window: rows that each sees, or None.
    """

    places: Tensor
    cu_rows_R: Tensor
    starts_R: Tensor | None
    ends_R: Tensor
    longest: int
    window: int | None


class Singles(NamedTuple):
    """Rows that stand alone, in blocks. Spans are from a first key to one behind the last.

    Attributes:
        cu_rows_B: rows before each block, and all of them.
        dense_B: span of keys that every row of the block sees.
        diagonal_N: span of each row behind its block's dense one.
        left_N: span of each row before it; None where there is none.
        batch_N: zeros: all rows share one sequence of keys.
    """

    places: Tensor
    cu_rows_B: Tensor
    dense_B: tuple[Tensor, Tensor]
    diagonal_N: tuple[Tensor, Tensor]
    left_N: tuple[Tensor, Tensor] | None
    batch_N: Tensor


class FlashPlan(NamedTuple):
    """How one set of rows is put to the kernels; the same for all layers of one reach."""

    runs: Runs | None
    singles: Singles | None

    @classmethod
    def of(cls, rows_S: Tensor, reach: Reach) -> FlashPlan:
        # The one question to the device: which rows stand side by side. Once per set of rows and reach.
        host_S = rows_S.cpu()
        border_S = torch.ones_like(host_S, dtype=torch.bool)
        border_S[1:] = host_S[1:] != host_S[:-1] + 1
        if reach.chunk is not None:
            border_S |= host_S % reach.chunk == 0
        starts_R = border_S.nonzero()[:, 0]
        stops_R = torch.cat([starts_R[1:], torch.tensor([host_S.numel()])])
        length_R = stops_R - starts_R
        long_R = length_R >= LONG_RUN
        in_run_S = long_R.repeat_interleave(length_R)
        runs = _runs(host_S, in_run_S, stops_R[long_R], length_R[long_R], reach) if bool(long_R.any()) else None
        singles = _singles(host_S, ~in_run_S, reach) if not bool(long_R.all()) else None
        return cls(*(part and _moved(part, rows_S.device) for part in (runs, singles)))


def _runs(host_S: Tensor, mine_S: Tensor, stops_R: Tensor, length_R: Tensor, reach: Reach) -> Runs:
    last_R = host_S[stops_R - 1]
    starts_R = _int32(first_seen(last_R, reach)) if reach.chunk is not None else None
    places = mine_S.nonzero()[:, 0]
    return Runs(places, _before(length_R), starts_R, _int32(last_R + 1), int(length_R.max()), reach.window)


def _singles(host_S: Tensor, mine_S: Tensor, reach: Reach) -> Singles:
    places = mine_S.nonzero()[:, 0]
    last_N = host_S[places]
    first_N = first_seen(last_N, reach)
    begin_B, end_B = row_blocks(first_N, BLOCK)[1], row_blocks(last_N, BLOCK)[0] + 1
    # Where the rows of a block have no key in common, each has all of its keys to itself.
    common_B = begin_B < end_B
    begin_B, end_B = torch.where(common_B, begin_B, 0), torch.where(common_B, end_B, 0)
    block_N = torch.arange(places.numel()) // BLOCK
    own_N = torch.where(common_B[block_N], end_B[block_N], first_N)
    left_N = None
    if reach.window is not None:
        left_N = _int32(first_N), _int32(torch.where(common_B[block_N], begin_B[block_N], first_N))
    counts_B = torch.bincount(block_N)
    dense_B, diagonal_N = (_int32(begin_B), _int32(end_B)), (_int32(own_N), _int32(last_N + 1))
    return Singles(places, _before(counts_B), dense_B, diagonal_N, left_N, _int32(torch.zeros_like(last_N)))


def _before(counts: Tensor) -> Tensor:
    """0, and the sum of the counts so far."""
    return _int32(pad(counts.cumsum(0), (1, 0)))


def _int32(x: Tensor) -> Tensor:
    return x.to(torch.int32)


def _moved(part: Any, device: torch.device) -> Any:
    """The tensors of a plan, one level of tuples deep, on the device."""
    return type(part)(*(_to(x, device) for x in part))


def _to(x: Any, device: torch.device) -> Any:
    if isinstance(x, tuple):
        return tuple(_to(item, device) for item in x)
    return x.to(device) if isinstance(x, Tensor) else x
