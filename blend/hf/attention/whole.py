"""One SDPA call under the whole mask: what runs on any GPU.

Softcap and sinks, which SDPA lacks, take the written-out path in blocks.

Shape suffixes as in :mod:`blend.hf.attention.eager`; ``G`` query heads per kv head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from blend.hf.attention.blocked import attend_blocked
from blend.hf.attention.bounds import remembered
from blend.hf.attention.mask import FusionMask, Reach

__all__ = ["attend_whole"]

ALIGNED = 16  # numbers; kernels copy a mask whose rows do not begin at such


def attend_whole(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: FusionMask,
    *,
    scaling: float,
    reach: Reach | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Same arguments and result as :func:`blend.hf.attention.eager.attend_eager`, up to rounding."""
    if softcap is not None or sinks is not None or query.shape[0] > 1:
        return attend_blocked(query, key, value, mask, scaling=scaling, reach=reach, softcap=softcap, sinks=sinks)
    reach = reach or mask.reach
    bias_ST = remembered(mask, ("whole", reach, query.dtype), lambda: _bias(mask, reach, query.dtype))
    # Kernels that take a mask do not share keys among heads. With a group's heads in the head dim, and the kv heads
    # as the batch, sharing is a stride of 0, and nothing is copied.
    kv_heads = key.shape[1]
    query_HGSD = query[0].unflatten(0, (kv_heads, -1))
    key_HGTD, value_HGTD = (x[0][:, None].expand(-1, query_HGSD.shape[1], -1, -1) for x in (key, value))
    out_HGSD = scaled_dot_product_attention(query_HGSD, key_HGTD, value_HGTD, attn_mask=bias_ST, scale=scaling)
    return out_HGSD.flatten(0, 1).transpose(0, 1)[None]


def _bias(mask: FusionMask, reach: Reach, dtype: torch.dtype) -> Tensor:
    """0 where seen and -inf elsewhere, ``[S, T]``; made once for all layers that share the mask."""
    seen_ST = mask.dense(reach)
    rows = seen_ST.new_zeros(seen_ST.shape[0], mask.total + -mask.total % ALIGNED, dtype=dtype)
    return rows[:, : mask.total].masked_fill_(~seen_ST, float("-inf"))
