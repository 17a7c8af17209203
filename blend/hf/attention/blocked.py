"""Blocked SDPA: selected rows in sorted blocks, each against just the keys that it can see.

A block of queries needs keys up to its last position only, so half of the work of a full mask falls away, and the
mask in memory is one block high. The query heads of a group are folded into the query length, so K and V are read
once and never repeated. Softcap and sinks, which SDPA lacks, take the written-out path per block.

Shape suffixes as in :mod:`blend.hf.attention.eager`; ``G`` query heads per kv head.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from blend.hf.attention.eager import mix_eager, weights_eager
from blend.hf.attention.mask import Block, FusionMask, Reach

__all__ = ["attend_blocked"]


def attend_blocked(
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
    batch, heads, count, _ = query.shape
    out = query.new_empty(batch, count, heads, value.shape[-1])
    for block in mask.blocks(reach):
        part = query[:, :, block.q0 : block.q1]
        keys, values = key[:, :, block.k0 : block.k1], value[:, :, block.k0 : block.k1]
        if softcap is None and sinks is None:
            result = _sdpa(part, keys, values, block, scaling)
        else:
            weights = weights_eager(part, keys, block.seen, scaling=scaling, softcap=softcap, sinks=sinks)
            result = mix_eager(weights, values)
        out[:, block.q0 : block.q1] = result
    return out


def _sdpa(part: Tensor, keys: Tensor, values: Tensor, block: Block, scaling: float) -> Tensor:
    batch, heads, rows, dim = part.shape
    kv_heads = keys.shape[1]
    groups = heads // kv_heads
    folded = part.reshape(batch, kv_heads, groups * rows, dim)
    # An additive mask in the query's dtype goes in as it is; a boolean one would be converted at every call.
    bias = block.bias(part.dtype).repeat(groups, 1)
    out = scaled_dot_product_attention(folded, keys, values, attn_mask=bias, scale=scaling)
    return out.reshape(batch, heads, rows, out.shape[-1]).transpose(1, 2)
