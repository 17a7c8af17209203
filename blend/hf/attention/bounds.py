"""Which keys blocks of selected rows can see, worked out from the rows' positions alone, on their device.

Every reach is an interval: a row sees the keys from a first one up to its own. Selected rows are sorted, so both ends
rise from row to row, and two rows of a block say all about it::

    first row of a block   f0 ................ l0
    last row of a block          f1 ................... l1
                           | some | every row sees | some |

No S x T mask is made, and nothing is asked of the device: that would stall the host until the device has caught up.

Shape suffixes: ``S`` selected rows, ``B`` blocks of them, ``K`` blocks of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from blend.hf.attention.mask import FusionMask, Reach

__all__ = ["BlockLists", "block_lists", "first_seen", "remembered", "row_blocks"]

_T = TypeVar("_T")


def remembered(mask: FusionMask, key: Hashable, make: Callable[[], _T]) -> _T:
    """What ``make`` gives, made once per mask and key: all layers of a pass share the mask."""
    if key not in mask.memo:
        mask.memo[key] = make()
    made: _T = mask.memo[key]
    return made


def first_seen(rows_S: Tensor, reach: Reach) -> Tensor:
    """First key that each row sees; the last is the row itself."""
    if reach.chunk is not None:
        return rows_S - rows_S % reach.chunk
    if reach.window is not None:
        return (rows_S - (reach.window - 1)).clamp_min(0)
    return torch.zeros_like(rows_S)


def row_blocks(x_S: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Values of the first and of the last row of each block of ``size`` rows, ``[B]`` each; the last may be short."""
    first_B = x_S[::size]
    return first_B, torch.cat([x_S[size - 1 :: size], x_S[-1:]])[: first_B.numel()]


class BlockLists(NamedTuple):
    """Blocks of keys for each block of rows, as block-sparse kernels take them; all int32.

    Attributes:
        partial_count_B: blocks of which some key is seen by some row, and that are not full.
        partial_BK: their numbers, ascending; what stands behind the count means nothing.
        full_count_B: blocks of which every row sees every key.
        full_BK: their numbers.
    """

    partial_count_B: Tensor
    partial_BK: Tensor
    full_count_B: Tensor
    full_BK: Tensor


def block_lists(first_S: Tensor, last_S: Tensor, total: int, rows: int, keys: int) -> BlockLists:
    """The lists for rows that see keys ``first .. last``, in blocks of ``rows`` by ``keys``.

    The gaps between what two rows of a block see (in windows) count as seen by some: kernels mask them.
    """
    low, high = row_blocks(first_S, rows), row_blocks(last_S, rows)
    begin_B, end_B = low[0] // keys, high[1] // keys + 1  # some row sees some key
    full_begin_B, full_end_B = (low[1] + keys - 1) // keys, (high[0] + 1) // keys  # every row sees every key
    full_begin_B = torch.minimum(full_begin_B, end_B)
    full_end_B = torch.maximum(full_begin_B, torch.minimum(full_end_B, end_B))
    index_K = torch.arange(-(-total // keys), device=first_S.device)
    before_B1 = (full_begin_B - begin_B)[:, None]
    partial_BK = torch.where(index_K < before_B1, begin_B[:, None] + index_K, full_end_B[:, None] + index_K - before_B1)
    full_count_B, full_BK = full_end_B - full_begin_B, full_begin_B[:, None] + index_K
    last = index_K.numel() - 1  # numbers behind the counts must still be those of blocks
    lists = end_B - begin_B - full_count_B, partial_BK.clamp_max(last), full_count_B, full_BK.clamp_max(last)
    return BlockLists(*(x.to(torch.int32) for x in lists))
