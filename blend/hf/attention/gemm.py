"""Blocked attention from plain matrix products, for CPUs that multiply bf16 natively.

torch's CPU flash kernel spends most of its time outside the two products: for 192 queries against 2,048 keys it
takes about twice as long as a bf16 product, a softmax and a bf16 product. What speaks against those three is that
the product rounds scores to bf16, an error of 2^-9 of the score itself. Softmax does not change when a constant is
taken off a row, so an estimate of the row's largest score is taken off *inside* the product, where sums are fp32: one
more dim, ``[q, -c] . [k, 1] = q.k - c``. What is rounded is then the distance to the top, small where weights are
large.

The estimate is the largest of the row's score with itself and with every 16th key that the whole block sees; any
value at or below the true maximum is safe.

Shape suffixes as in :mod:`blend.hf.attention.eager`; ``G`` query heads per kv head, ``n`` rows of a block.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

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
    own_HGS = (q_HGSD.float() * key[0].index_select(1, mask.rows_S)[:, None].float()).sum(-1)
    keys = _Keys.of(key[0])
    out = query.new_empty(1, count, heads, value.shape[-1])
    for block in mask.blocks(reach):
        for head in range(kv_heads):  # one kv head at a time: its scores stay in the cache
            q_GnD, own_Gn = q_HGSD[head, :, block.q0 : block.q1], own_HGS[head, :, block.q0 : block.q1]
            scores = _shifted_scores(q_GnD.flatten(0, 1), own_Gn.reshape(-1, 1), keys, head, block)
            if not exact:
                scores *= scaling
            by_group = scores.view(groups, block.q1 - block.q0, -1)
            for columns, hidden in block.hidden:
                by_group[..., columns].masked_fill_(hidden, float("-inf"))
            result = scores.softmax(dim=-1) @ value[0, head, block.k0 : block.k1]
            by_group = result.view(groups, block.q1 - block.q0, -1)
            out[0, block.q0 : block.q1, head * groups : (head + 1) * groups] = by_group.transpose(0, 1)
    return out


class _Keys(NamedTuple):
    """Keys laid out for the products: ``[H, D + 2, T]`` with a row of ones, and every 16th, ``[H, D, T / 16]``."""

    shifted: Tensor
    sampled: Tensor

    @classmethod
    def of(cls, key_HTD: Tensor) -> _Keys:
        ones = key_HTD.new_ones(1, 1, 1).expand(*key_HTD.shape[:2], 1)
        # Behind the ones comes a zero, which keeps each key a multiple of four bytes.
        shifted = pad(torch.cat([key_HTD, ones], dim=-1), (0, 1)).transpose(-1, -2)
        return cls(shifted, key_HTD[:, ::_STRIDE].contiguous().transpose(-1, -2))


def _shifted_scores(q_ND: Tensor, own_N1: Tensor, keys: _Keys, head: int, block: Block) -> Tensor:
    """``q.k - c`` for the block's keys, ``[N, K]``, where ``c`` is at most the row's largest score."""
    top = own_N1
    first, last = (-(-column // _STRIDE) for column in block.common)
    if first < last:
        sampled = q_ND @ keys.sampled[head, :, first:last]
        top = torch.maximum(top, sampled.amax(dim=-1, keepdim=True).float())
    shift = pad(-top.to(q_ND.dtype), (0, 1))
    return torch.cat([q_ND, shift], dim=-1) @ keys.shifted[head, :, block.k0 : block.k1]
