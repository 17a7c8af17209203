"""The specification: attention of selected rows, written out. Every backend is tested against it.

Shape suffixes: ``B`` batch, ``Hq`` query heads, ``Hkv`` kv heads, ``S`` selected rows, ``T`` all rows, ``D`` head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blend.hf.attention.mask import FusionMask, Reach

__all__ = ["attend_eager", "mix_eager", "weights_eager"]


def attend_eager(
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
    """Softmax attention of ``query [B, Hq, S, D]`` over ``key, value [B, Hkv, T, D]``, grouped heads shared.

    Args:
        mask: who sees whom, by absolute position.
        scaling: multiplies the dot products.
        reach: the layer's window or chunk, if it differs from the mask's.
        softcap: ``cap * tanh(score / cap)`` before masking (Gemma 2).
        sinks: one extra logit per query head that takes probability and adds no value (gpt-oss), ``[Hq]``.

    Returns:
        ``[B, S, Hq, Dv]`` in the query's dtype; softmax in fp32.
    """
    weights = weights_eager(query, key, mask.dense(reach), scaling=scaling, softcap=softcap, sinks=sinks)
    return mix_eager(weights, value)


def mix_eager(weights: Tensor, value: Tensor) -> Tensor:
    """Weights ``[B, Hq, S, T]`` times values ``[B, Hkv, T, Dv]``, as ``[B, S, Hq, Dv]`` in the values' dtype."""
    batch, heads, count, total = weights.shape
    kv_heads = value.shape[1]
    folded = weights.to(value.dtype).reshape(batch, kv_heads, heads // kv_heads * count, total)
    return (folded @ value).reshape(batch, heads, count, -1).transpose(1, 2).contiguous()


def weights_eager(
    query: Tensor,
    key: Tensor,
    allowed: Tensor | None,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention weights, fp32 ``[B, Hq, S, T]``; ``allowed`` is bool, broadcast over ``[S, T]``."""
    batch, heads, count, dim = query.shape
    kv_heads = key.shape[1]
    # The query heads of a group stand side by side, so folding them into the query length shares the keys.
    folded = query.reshape(batch, kv_heads, heads // kv_heads * count, dim)
    scores = (folded @ key.transpose(-1, -2)).float().reshape(batch, heads, count, -1).mul_(scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if allowed is not None:
        # Added, for a bool mask that is spread over the heads takes several times as long.
        scores += torch.zeros(allowed.shape, device=scores.device).masked_fill_(~allowed, float("-inf"))
    if sinks is None:
        return scores.softmax(dim=-1)
    column = sinks.float().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
