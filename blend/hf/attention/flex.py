"""torch's flex_attention under a block mask that is worked out, not evaluated: for GPUs with nothing to install.

One kernel does it all: blocks that every row sees in full run without a mask, those on the diagonal compare each key
with the first and the last one that its row sees, and all others are skipped. Whatever the reach, the mask function is
the same, so layers with a window and layers without share one compiled kernel.

On a CPU flex_attention runs as it is written, which takes the memory of a whole mask: only to compare results.

Shape suffixes as in :mod:`blend.hf.attention.eager`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.functional import pad

from blend.hf.attention.bounds import block_lists, first_seen, remembered
from blend.hf.attention.mask import FusionMask, Reach
from blend.hf.attention.whole import attend_whole

__all__ = ["attend_flex", "flex_refuses"]

BLOCK = 128
FEW = 16
"""Fewer rows, as in a last layer that runs one, are not worth a kernel of their own."""
LEAST_DIM = 16  # of the products of a GPU
RECOMPILE_LIMIT = 64
"""Kernels per process: one for each head layout, dtype and kind of length, where torch would stop after 8."""


def flex_refuses(query: Tensor, value: Tensor) -> str | None:
    """Why flex_attention cannot serve such a call on this device; None where it can."""
    if query.device.type != "cuda":
        return f"flex attention is for CUDA devices, and the model is on {query.device}"
    if torch.cuda.get_device_capability(query.device) < (7, 0):
        return "flex attention needs a GPU of compute capability 7.0 or later"
    if find_spec("triton") is None:
        return "flex attention compiles with triton, which is not installed: pip install triton"
    return None


def attend_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: FusionMask,
    *,
    scaling: float,
    reach: Reach | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kernel: Callable[..., Any] | None = None,
) -> Tensor:
    """Same arguments and result as :func:`blend.hf.attention.eager.attend_eager`, up to rounding.

    Args:
        kernel: in place of the compiled ``flex_attention``.
    """
    count, width = query.shape[2], value.shape[3]
    if count < FEW:
        return attend_whole(query, key, value, mask, scaling=scaling, reach=reach, softcap=softcap, sinks=sinks)
    block_mask = _block_mask(mask, reach or mask.reach)
    options: dict[str, Any] = {} if sinks is None else _asks_for_lse()
    result = (kernel or _kernel(query.device.type))(
        pad(_widened(query), (0, 0, 0, -count % BLOCK)),
        _widened(key),
        _widened(value),
        score_mod=_capped(softcap, query.device) if softcap is not None else None,
        block_mask=block_mask,
        scale=scaling,
        enable_gqa=True,
        **options,
    )
    out_HSD: Tensor = result if sinks is None else _sunk(result, sinks)
    return out_HSD[:, :, :count, :width].transpose(1, 2).to(query.dtype)


def _widened(x: Tensor) -> Tensor:
    return pad(x, (0, LEAST_DIM - x.shape[-1])) if x.shape[-1] < LEAST_DIM else x


def _block_mask(mask: FusionMask, reach: Reach) -> flex.BlockMask:
    return remembered(mask, ("flex", reach), lambda: _make_block_mask(mask.rows_S, mask.total, reach))


def _make_block_mask(rows_S: Tensor, total: int, reach: Reach) -> flex.BlockMask:
    # Rows that fill up the last block see what the last row sees: they widen nothing and are thrown away.
    filling = rows_S[-1:].expand(-rows_S.numel() % BLOCK)
    last_S = torch.cat([rows_S, filling]).to(torch.int32)
    first_S = first_seen(last_S, reach)

    def seen(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key >= first_S[row]) & (key <= last_S[row])

    lists = block_lists(first_S, last_S, total, BLOCK, BLOCK)
    partial_count, partial, full_count, full = (x[None, None] for x in lists)
    return flex.BlockMask.from_kv_blocks(
        partial_count,
        partial,
        full_count,
        full,
        BLOCK_SIZE=BLOCK,
        mask_mod=seen,
        seq_lengths=(last_S.numel(), total),
    )


@cache
def _capped(softcap: float, device: torch.device) -> Callable[..., Tensor]:
    """A score function with the cap as a tensor: a plain number would be a symbol where lengths are, and fail there."""
    with torch.inference_mode(False):  # of one kind wherever it is first made, or it would be another kernel
        limit = torch.tensor(softcap, device=device)

    def cap(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return limit * torch.tanh(score / limit)

    return cap


@cache
def _kernel(device: str) -> Callable[..., Any]:
    """Compiled once for all lengths; a length that is a whole number of blocks, or a single block, may be another."""
    if device == "cpu":
        return flex.flex_attention
    known = inspect.signature(torch.compile).parameters
    limit: dict[str, Any] = {"recompile_limit": RECOMPILE_LIMIT} if "recompile_limit" in known else {}
    return torch.compile(flex.flex_attention, dynamic=True, **limit)


def _asks_for_lse() -> dict[str, Any]:
    request = getattr(flex, "AuxRequest", None)  # torch 2.9 and later
    return {"return_lse": True} if request is None else {"return_aux": request(lse=True)}


def _sunk(result: tuple[Tensor, Any], sinks: Tensor) -> Tensor:
    """A sink takes its share of what the weights would sum up to."""
    out, aux = result
    lse: Tensor = aux if isinstance(aux, Tensor) else aux.lse
    return out * torch.sigmoid(lse - sinks.float().view(1, -1, 1))[..., None]
