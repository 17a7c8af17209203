"""flash-attn's two functions and flash-attn 4's one in plain torch, as documentation and sources say they behave.

They stand in for kernels that run on GPUs only, so that what is wrapped around these can be tested anywhere. They
refuse what the kernels refuse, and go by the arguments alone: of masks and rows they know nothing.

Shape suffixes: ``S`` queries, ``T`` keys, ``H`` query heads, ``D`` head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from blend.hf.attention.fa4 import Fa4Kernel
from blend.hf.attention.flash import FlashKernels


def dense(query_SHD, key_THD, value_THD, seen_ST, scale, softcap):
    """Output ``[S, H, D]`` and log-sum-exp ``[H, S]``: 0 and +inf for a query that sees no key."""
    groups = query_SHD.shape[1] // key_THD.shape[1]
    key, value = (x.float().repeat_interleave(groups, dim=1) for x in (key_THD, value_THD))
    scores = torch.einsum("shd,thd->hst", query_SHD.float(), key) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen_ST, float("-inf"))
    lse = scores.logsumexp(dim=-1)
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)
    out = torch.einsum("hst,thd->shd", weights, value).to(query_SHD.dtype)
    return out, lse.masked_fill(lse == float("-inf"), float("inf"))


def refuse_what_flash_refuses(query, key, value, lengths, heads_dim=-2):
    assert all(x.stride(-1) == 1 for x in (query, key, value)), "the last dim must be contiguous"
    assert key.shape == value.shape, "keys and values have one head dim"
    assert query.shape[-1] == key.shape[-1]
    assert query.shape[-1] % 8 == 0
    assert query.shape[-1] <= 256
    assert query.shape[heads_dim] % key.shape[heads_dim] == 0
    for x in lengths:
        if x is not None:
            assert x.dtype == torch.int32
            assert x.is_contiguous()
            assert x.device == query.device


def varlen(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    return_softmax=False,
    block_table=None,
    leftpad_k=None,
    seqused_k=None,
):
    """Keys of sequence b: rows ``cu_k[b] + leftpad[b]`` up to ``cu_k[b] + seqused[b]`` (else ``cu_k[b + 1]``)."""
    refuse_what_flash_refuses(q, k, v, (cu_seqlens_q, cu_seqlens_k, leftpad_k, seqused_k))
    assert q.ndim == 3
    assert k.ndim == 3
    assert dropout_p == 0.0
    assert alibi_slopes is None
    assert block_table is None
    count = cu_seqlens_q.diff()
    assert int(count.max()) <= max_seqlen_q
    assert int(cu_seqlens_q[-1]) == q.shape[0]
    assert all(x is None or x.shape == count.shape for x in (leftpad_k, seqused_k))
    begin = cu_seqlens_k[:-1] + (leftpad_k if leftpad_k is not None else 0)
    end = cu_seqlens_k[:-1] + seqused_k if seqused_k is not None else cu_seqlens_k[1:]
    assert int((end - begin).max()) <= max_seqlen_k
    assert int(end.max()) <= k.shape[0]
    assert int(begin.min()) >= 0
    sequence_S = torch.arange(count.numel()).repeat_interleave(count.long())
    place_S = torch.arange(q.shape[0]) - cu_seqlens_q[sequence_S]
    seen = spans(begin[sequence_S], end[sequence_S], k.shape[0])
    # The mask is aligned to the bottom right corner: a sequence's last query sees its last key.
    diagonal_S = end[sequence_S] - count[sequence_S] + place_S
    seen &= band(diagonal_S, k.shape[0], window_size_left, 0 if causal else window_size_right)
    return *dense(q, k, v, seen, softmax_scale, softcap), torch.empty(0), torch.empty(2)


def with_kvcache(
    q,
    k_cache,
    v_cache,
    *,
    cache_seqlens,
    cache_batch_idx,
    cache_leftpad=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    return_softmax_lse=False,
):
    """One sequence per row of ``q``; its keys are those of row ``cache_batch_idx`` from the left pad to the length."""
    refuse_what_flash_refuses(q, k_cache, v_cache, (cache_seqlens, cache_batch_idx, cache_leftpad))
    batch, count, heads, width = q.shape
    assert cache_seqlens.shape == cache_batch_idx.shape == cache_leftpad.shape == (batch,)
    assert int(cache_batch_idx.max()) < k_cache.shape[0]
    assert int(cache_seqlens.max()) <= k_cache.shape[1]
    assert int(cache_leftpad.min()) >= 0
    outs, lses = [], []
    for row in cache_batch_idx.unique().tolist():
        mine = (cache_batch_idx == row).nonzero()[:, 0]
        begin, end = (x[mine].repeat_interleave(count) for x in (cache_leftpad, cache_seqlens))
        diagonal = end - count + torch.arange(count).repeat(mine.numel())
        seen = spans(begin, end, k_cache.shape[1])
        seen &= band(diagonal, k_cache.shape[1], window_size[0], 0 if causal else window_size[1])
        out, lse = dense(q[mine].flatten(0, 1), k_cache[row], v_cache[row], seen, softmax_scale, softcap)
        outs.append(out.view(-1, count, heads, width))
        lses.append(lse.view(heads, -1, count).transpose(0, 1))
    order = torch.cat([(cache_batch_idx == row).nonzero()[:, 0] for row in cache_batch_idx.unique().tolist()]).argsort()
    out, lse = torch.cat(outs)[order], torch.cat(lses)[order]
    return (out, lse) if return_softmax_lse else out


def spans(begin_S, end_S, total):
    key = torch.arange(total)
    return (key >= begin_S[:, None]) & (key < end_S[:, None])


def band(diagonal_S, total, left, right):
    """Keys from ``left`` before the diagonal to ``right`` behind it; -1: no limit."""
    offset = torch.arange(total) - diagonal_S[:, None]
    return ((offset >= -left) | (left < 0)) & ((offset <= right) | (right < 0))


FLASH = FlashKernels(varlen, with_kvcache)


class Lists(NamedTuple):
    """flash-attn 4's BlockSparseTensorsTorch."""

    mask_block_cnt: torch.Tensor
    mask_block_idx: torch.Tensor
    full_block_cnt: torch.Tensor | None = None
    full_block_idx: torch.Tensor | None = None
    block_size: tuple[int, int] | None = None


def seen_by(batch, head, m_idx, n_idx, seqlen_info, aux_tensors):
    return (n_idx >= aux_tensors[0][m_idx]) & (n_idx <= aux_tensors[1][m_idx])


def fa4_attend(
    q, k, v, *, softmax_scale, softcap, pack_gqa, mask_mod, aux_tensors, block_sparse_tensors, return_lse=False
):
    """Full blocks without the mask, partial ones with it, others not at all."""
    lists, (count, total) = block_sparse_tensors, (q.shape[1], k.shape[1])
    rows, keys = lists.block_size
    assert not pack_gqa
    assert q.shape[0] == 1
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in (*lists[:4], *aux_tensors))
    assert lists.mask_block_cnt.shape == (1, 1, -(-count // rows))
    full, some = (expand(*pair, rows, keys, count, total) for pair in (lists[2:4], lists[:2]))
    assert not (full & some).any(), "a block is in one list only"
    masked = mask_mod(0, 0, torch.arange(count)[:, None], torch.arange(total)[None], None, aux_tensors)
    out, lse = dense(q[0], k[0], v[0], full | (some & masked), softmax_scale, softcap)
    return out[None], lse[None] if return_lse else None


def expand(counts, indices, rows, keys, count, total):
    """A list of blocks as a mask ``[S, T]``."""
    picked = torch.arange(indices.shape[-1]) < counts[0, 0][:, None]
    assert (indices[0, 0][picked] < -(-total // keys)).all()
    grid = torch.zeros(counts.shape[-1], -(-total // keys), dtype=torch.int64)
    grid.scatter_add_(1, indices[0, 0].long(), picked.long())
    assert grid.max() <= 1, "a block stands once in a list"
    return grid.bool().repeat_interleave(rows, 0)[:count].repeat_interleave(keys, 1)[:, :total]


FA4 = Fa4Kernel(fa4_attend, Lists, seen_by)
