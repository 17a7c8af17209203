"""Blocked attention from plain matrix products, for CPUs that multiply bf16 natively.

torch's CPU flash kernel spends most of its time outside the two products: for 192 queries against 2,048 keys it
takes about twice as long as a bf16 product, a softmax and a bf16 product. What speaks against those three is that
the product rounds scores to bf16, an error of 2^-9 of the score itself. Softmax does not change when a constant is
taken off a row, so an estimate of the row's largest score is taken off *inside* the product, where sums are fp32: the
product is added to a matrix that holds ``-c`` where a key is seen, and ``-inf`` where it is not. What is rounded is
then the distance to the top, small where weights are large; and the mask costs nothing more.

The estimate is the largest of the row's score with itself and with every 16th key that the whole block sees; any
value at or below the true maximum is safe.

Shape suffixes as in :mod:`blend.hf.attention.eager`; ``G`` query heads per kv head, ``n`` rows of a block, ``K`` keys
that one of them sees.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from blend.hf.attention.blocked import attend_blocked
from blend.hf.attention.mask import Block, FusionMask, Reach

__all__ = ["attend_gemm"]

_STRIDE = 16


def attend_gemm(
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
    """Same arguments and result as :func:`blend.hf.attention.eager.attend_eager`, up to rounding.

    Softcap and sinks are not invariant under a shift, and windows leave too few keys to gain: blocked path.
    """
    narrow = (reach or mask.reach) != Reach()
    if narrow or softcap is not None or sinks is not None or query.shape[0] > 1:
        return attend_blocked(query, key, value, mask, scaling=scaling, reach=reach, softcap=softcap, sinks=sinks)
    heads, kv_heads, count = query.shape[1], key.shape[1], query.shape[2]
    groups = heads // kv_heads
    # A power of two scales the queries without rounding; any other factor waits for the shifted scores.
    exact = math.frexp(scaling)[0] == 0.5
    q_HGSD = (query[0] * scaling if exact else query[0]).unflatten(0, (kv_heads, groups))
    own_HGS = (q_HGSD * key[0].index_select(1, mask.rows_S)[:, None]).sum(-1)
    sampled_HKD = key[0, :, ::_STRIDE].contiguous()
    out = query.new_empty(1, count, heads, value.shape[-1])
    blocks = mask.blocks(reach)
    # One block's scores, in the same memory for all: it stays in the processor's cache.
    scratch = query.new_empty(max(groups * block.size for block in blocks))
    for block in blocks:
        for head in range(kv_heads):  # one kv head at a time: its scores stay in the cache
            q_ND = q_HGSD[head, :, block.q0 : block.q1].flatten(0, 1)
            own_N1 = own_HGS[head, :, block.q0 : block.q1].reshape(-1, 1)
            scores_NK = scratch[: groups * block.size].view(q_ND.shape[0], -1)
            _cover(scores_NK.unflatten(0, (groups, -1)), _top(q_ND, own_N1, sampled_HKD[head], block), block)
            scores_NK.addmm_(q_ND, key[0, head, block.k0 : block.k1].t())
            if not exact:
                scores_NK *= scaling
            weights_NK = torch.softmax(scores_NK, dim=-1, out=scores_NK)  # a row is read before it is written
            mixed = (weights_NK @ value[0, head, block.k0 : block.k1]).unflatten(0, (groups, -1))
            out[0, block.q0 : block.q1, head * groups : (head + 1) * groups] = mixed.transpose(0, 1)
    return out


def _top(q_ND: Tensor, own_N1: Tensor, sampled_KD: Tensor, block: Block) -> Tensor:
    """At most each row's largest score, ``[N, 1]``."""
    first, last = (-(-(block.k0 + column) // _STRIDE) for column in (block.common.start, block.common.stop))
    if first >= last:
        return own_N1
    return torch.maximum(own_N1, (q_ND @ sampled_KD[first:last].t()).amax(dim=-1, keepdim=True))


def _cover(scores_GnK: Tensor, top_N1: Tensor, block: Block) -> None:
    """Fills with ``-top`` where a key is seen, with ``-inf`` where it is not."""
    shift_Gn1 = top_N1.neg().view(*scores_GnK.shape[:2], 1)
    scores_GnK[..., block.common] = shift_Gn1
    for columns, bias in block.edges(scores_GnK.dtype):
        torch.add(shift_Gn1, bias, out=scores_GnK[..., columns])
