"""flash-attn 2 without a mask: rows of a block share what they all see, and each adds what is its own.

flash-attn knows causal and nothing finer, but its calls give each row's log-sum-exp, by which partial results are put
together exactly. Selected rows are cut into blocks of 128, and what a block sees into three::

    row i of a block   | left |      dense      | diagonal |        left: with windows alone
                       f_i ... c0 ............ c1 ....... p_i

* *dense*: the keys that every row of the block sees; no mask, one call for all blocks (varlen, ``seqused_k``);
* *diagonal* and *left*: what row i sees beyond them; one query per sequence, over the same keys
  (``flash_attn_with_kvcache`` with ``cache_leftpad``). A sequence of one query wastes most of a tile, but these spans
  are short;
* 64 or more rows side by side (a question, a recomputed chunk's head) are causal among themselves, and one call with
  the causal mask in the bottom right corner is all that they need.

Written from flash-attn's source and documentation, and tested with kernels emulated from these. **The real kernels have
not been run with it yet**: ``tests/gpu/run.py`` does that.

Shape suffixes: ``S`` selected rows, ``N`` those that stand alone, ``H`` query heads, ``D`` head dim, ``B`` blocks,
``R`` runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from blend.hf.attention.blocked import attend_blocked
from blend.hf.attention.bounds import remembered
from blend.hf.attention.flash_plan import BLOCK, FlashPlan, Runs, Singles
from blend.hf.attention.mask import FusionMask, Reach
from blend.hf.attention.missing import BackendMissing

__all__ = ["FlashKernels", "attend_flash", "flash_refuses"]

WIDEST = 256  # head dim


class FlashKernels(NamedTuple):
    """flash-attn's ``_flash_attn_varlen_forward`` and ``flash_attn_with_kvcache``."""

    varlen: Callable[..., Any]
    with_kvcache: Callable[..., Any]


@cache
def flash_kernels() -> FlashKernels:
    """Raises :class:`BackendMissing` where flash-attn 2.7 or later is not installed."""
    try:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward, flash_attn_with_kvcache
    except ImportError as error:
        raise BackendMissing(
            f'attention backend "flash" needs flash-attn 2 ({error}): pip install "kvblend[flash]"'
        ) from error
    return FlashKernels(_flash_attn_varlen_forward, flash_attn_with_kvcache)


def flash_refuses(query: Tensor, value: Tensor) -> str | None:
    """Why flash-attn 2 cannot serve such a call on this device; None where it can."""
    if query.device.type != "cuda" or torch.cuda.get_device_capability(query.device) < (8, 0):
        return f"flash-attn 2 needs a GPU of compute capability 8.0 or later, and the model is on {query.device}"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"flash-attn 2 serves fp16 and bf16, and the model is {query.dtype}"
    if max(query.shape[-1], value.shape[-1]) > WIDEST:
        return f"flash-attn 2 serves head dims up to {WIDEST}, and the model has {query.shape[-1]}"
    try:
        flash_kernels()
    except BackendMissing as missing:
        return str(missing)
    return None


def attend_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: FusionMask,
    *,
    scaling: float,
    reach: Reach | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kernels: FlashKernels | None = None,
) -> Tensor:
    """Same arguments and result as :func:`blend.hf.attention.eager.attend_eager`, up to rounding.

    Args:
        kernels: in place of flash-attn's.

    Raises:
        BackendMissing: flash-attn is not installed.
    """
    kernels = kernels or flash_kernels()
    if query.shape[0] > 1:
        return attend_blocked(query, key, value, mask, scaling=scaling, reach=reach, softcap=softcap, sinks=sinks)
    reach = reach or mask.reach
    plan = remembered(mask, ("flash", reach), lambda: FlashPlan.of(mask.rows_S, reach))
    width = value.shape[-1]
    wide = _width(query, value)
    call = _Call(kernels, scaling, softcap or 0.0, *_as_rows(key, value, wide))
    query_SHD = _fit(query, wide)[0].transpose(0, 1)
    if plan.runs is None:
        assert plan.singles is not None, "a mask has rows"
        out_SHD = call.singles(query_SHD, plan.singles, sinks)
    elif plan.singles is None:
        out_SHD = call.runs(query_SHD, plan.runs, sinks)
    else:
        out_SHD = query_SHD.new_empty(query_SHD.shape)
        runs, singles = query_SHD.index_select(0, plan.runs.places), query_SHD.index_select(0, plan.singles.places)
        out_SHD.index_copy_(0, plan.runs.places, call.runs(runs, plan.runs, sinks))
        out_SHD.index_copy_(0, plan.singles.places, call.singles(singles, plan.singles, sinks))
    return out_SHD[None, :, :, :width]


class _Call(NamedTuple):
    """One layer's call: kernels, numbers, and its keys and values as rows ``[T, Hkv, D]``."""

    kernels: FlashKernels
    scaling: float
    softcap: float
    key: Tensor
    value: Tensor

    def runs(self, query_SHD: Tensor, runs: Runs, sinks: Tensor | None) -> Tensor:
        out, lse = self._varlen(
            query_SHD, runs.cu_rows_R, runs.longest, runs.starts_R, runs.ends_R, causal=True, window=runs.window
        )
        return out if sinks is None else _merged([(out, lse)], sinks)

    def singles(self, query_SHD: Tensor, singles: Singles, sinks: Tensor | None) -> Tensor:
        parts = [
            self._varlen(query_SHD, singles.cu_rows_B, BLOCK, *singles.dense_B),
            self._row_by_row(query_SHD, *singles.diagonal_N, singles.batch_N),
        ]
        if singles.left_N is not None:
            parts.append(self._row_by_row(query_SHD, *singles.left_N, singles.batch_N))
        return _merged(parts, sinks)

    def _varlen(
        self,
        query_SHD: Tensor,
        cu_rows: Tensor,
        longest: int,
        starts: Tensor | None,
        ends: Tensor,
        causal: bool = False,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Output ``[S, H, D]`` and log-sum-exp ``[H, S]``; every sequence takes its span of the same keys."""
        out, lse, *_ = self.kernels.varlen(
            query_SHD,
            self.key,
            self.value,
            cu_rows,
            torch.zeros_like(cu_rows),  # all sequences of keys begin at row 0; the spans say which part counts
            longest,
            self.key.shape[0],
            0.0,
            self.scaling,
            causal,
            window_size_left=-1 if window is None else window - 1,
            window_size_right=0 if causal else -1,
            softcap=self.softcap,
            leftpad_k=starts,
            seqused_k=ends,
        )
        return out, lse

    def _row_by_row(self, query_NHD: Tensor, first: Tensor, end: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = self.kernels.with_kvcache(
            query_NHD[:, None],
            self.key[None],
            self.value[None],
            cache_seqlens=end,
            cache_batch_idx=batch,
            cache_leftpad=first,
            softmax_scale=self.scaling,
            causal=True,
            softcap=self.softcap,
            return_softmax_lse=True,
        )
        return out[:, 0], lse[:, :, 0].transpose(0, 1)


def _merged(parts: list[tuple[Tensor, Tensor]], sinks: Tensor | None) -> Tensor:
    """Partial results ``[S, H, D]`` with their log-sum-exps ``[H, S]``, put together in fp32."""
    lse_PHS = torch.stack([lse for _, lse in parts])
    lse_PHS = lse_PHS.masked_fill(lse_PHS == float("inf"), float("-inf"))  # so the kernels mark a span without keys
    total_HS = lse_PHS.logsumexp(dim=0)
    if sinks is not None:
        total_HS = torch.logaddexp(total_HS, sinks.float()[:, None])
    shares = (lse_PHS - total_HS).exp().transpose(1, 2)[..., None]  # [P, S, H, 1]
    out_SHD: Tensor = parts[0][0].float() * shares[0]
    for (out, _), share in zip(parts[1:], shares[1:], strict=True):
        out_SHD += out * share
    return out_SHD.to(parts[0][0].dtype)


def _width(query: Tensor, value: Tensor) -> int:
    """The kernels want one head dim for keys and values, and a multiple of eight."""
    widest = max(query.shape[-1], value.shape[-1])
    return widest + -widest % 8


def _fit(x: Tensor, width: int) -> Tensor:
    return pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


def _as_rows(key: Tensor, value: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """``[1, H, T, D]`` as a view ``[T, H, D]``: any strides will do but that of the last dim."""
    return _fit(key, width)[0].transpose(0, 1), _fit(value, width)[0].transpose(0, 1)
