"""flash-attn 4 with a mask of our own: one kernel over the blocks that can be seen, as in :mod:`.flex`.

Optional: a beta package (``flash-attn-4``) that compiles its kernels at the first call. Written from its source and
documentation, and tested with a kernel emulated from these. **The real kernel has not been run with it yet**:
``tests/gpu/run.py`` does that.

Shape suffixes as in :mod:`blend.hf.attention.eager`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blend.hf.attention.blocked import attend_blocked
from blend.hf.attention.bounds import block_lists, first_seen, remembered
from blend.hf.attention.mask import FusionMask, Reach
from blend.hf.attention.missing import BackendMissing

__all__ = ["Fa4Kernel", "attend_fa4", "fa4_refuses"]

KEY_BLOCK = 128
SERVED = (9, 10, 11)
"""Compute capabilities, major: below, and on 12, the kernels know no block sparsity or have not been looked at."""


class Fa4Kernel(NamedTuple):
    """``flash_attn_func``, its class of block lists, and the mask in its language."""

    attend: Callable[..., Any]
    lists: Callable[..., Any]
    mask: Any


@cache
def fa4_kernel() -> Fa4Kernel:
    """Raises :class:`BackendMissing` where flash-attn 4 is not installed."""
    try:
        # An optional package without types: what mypy says of it depends on whether it is there.
        import cutlass  # type: ignore[import-not-found, unused-ignore]
        import cutlass.cute as cute  # type: ignore[import-not-found, unused-ignore]
        from flash_attn.cute import flash_attn_func, utils
        from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    except ImportError as error:
        raise BackendMissing(
            f'attention backend "fa4" needs flash-attn 4 ({error}): pip install flash-attn-4, or leave the choice open'
        ) from error

    # Written in that package's language, and untyped as its own masks are.
    @cute.jit  # type: ignore[untyped-decorator, unused-ignore]
    def seen(batch, head, m_idx, n_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        first = utils.scalar_to_ssa(aux_tensors[0][m_idx[0]], cutlass.Int32)
        last = utils.scalar_to_ssa(aux_tensors[1][m_idx[0]], cutlass.Int32)
        return (n_idx >= first) & (n_idx <= last)

    return Fa4Kernel(flash_attn_func, BlockSparseTensorsTorch, seen)


def fa4_refuses(query: Tensor, value: Tensor) -> str | None:
    """Why flash-attn 4 cannot serve such a call on this device; None where it can."""
    major = torch.cuda.get_device_capability(query.device)[0] if query.device.type == "cuda" else 0
    if major not in SERVED:
        return f"flash-attn 4 with blocks needs compute capability 9 to 11, and the model is on {query.device}"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"flash-attn 4 serves fp16 and bf16, and the model is {query.dtype}"
    dims = query.shape[-1], value.shape[-1]
    if any(dim % 8 for dim in dims) or max(dims) > (256 if major == 9 else 128):
        return f"flash-attn 4 does not serve heads of {dims[0]} and {dims[1]} dims on this device"
    try:
        fa4_kernel()
    except BackendMissing as missing:
        return str(missing)
    return None


def attend_fa4(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: FusionMask,
    *,
    scaling: float,
    reach: Reach | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kernel: Fa4Kernel | None = None,
) -> Tensor:
    """Same arguments and result as :func:`blend.hf.attention.eager.attend_eager`, up to rounding.

    Args:
        kernel: in place of flash-attn's.

    Raises:
        BackendMissing: flash-attn 4 is not installed.
    """
    kernel = kernel or fa4_kernel()
    if query.shape[0] > 1:
        return attend_blocked(query, key, value, mask, scaling=scaling, reach=reach, softcap=softcap, sinks=sinks)
    reach = reach or mask.reach
    rows = _row_block(query.device)
    plan = remembered(mask, ("fa4", reach), lambda: _Plan.of(mask, reach, rows))
    out, lse = kernel.attend(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        softmax_scale=scaling,
        softcap=softcap or 0.0,
        pack_gqa=False,  # packed heads would number the rows of a block otherwise
        mask_mod=kernel.mask,
        aux_tensors=[plan.first_S, plan.last_S],
        block_sparse_tensors=kernel.lists(*plan.lists, block_size=(rows, KEY_BLOCK)),
        return_lse=sinks is not None,
    )
    if sinks is None:
        result: Tensor = out
        return result
    share_HS = torch.sigmoid(lse[0] - sinks.float()[:, None])
    sunk: Tensor = (out * share_HS.transpose(0, 1)[None, :, :, None]).to(query.dtype)
    return sunk


class _Plan(NamedTuple):
    """First and last key of each row, and the blocks that follow from them, ``[1, 1, B]`` and ``[1, 1, B, K]``."""

    first_S: Tensor
    last_S: Tensor
    lists: tuple[Tensor, ...]

    @classmethod
    def of(cls, mask: FusionMask, reach: Reach, rows: int) -> _Plan:
        last_S = mask.rows_S.to(torch.int32)
        first_S = first_seen(last_S, reach)
        lists = block_lists(first_S, last_S, mask.total, rows, KEY_BLOCK)
        return cls(first_S, last_S, tuple(x[None, None].contiguous() for x in lists))


def _row_block(device: torch.device) -> int:
    """Two tiles of 128 rows go through a Blackwell kernel at a time."""
    return 256 if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10 else 128
