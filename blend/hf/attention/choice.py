"""Which kernel attends: named by the user, or the fastest that this device has and that has shown to be right.

``KVBLEND_ATTENTION`` names one of :data:`BACKENDS` for the whole process; a name that cannot serve the model is
refused. Without it, a CPU takes ``gemm`` where it multiplies bf16 natively, else ``blocked``; a CUDA device takes the
first of ``fa4``, ``flash``, ``flex`` and ``sdpa`` that is installed, serves the model's dtype and head dim, and agrees
with the specification on a small example. That example runs once per kind of call: kernels that compile themselves, or
were built for another GPU, fail there and not in an answer.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from blend.hf.attention.blocked import attend_blocked
from blend.hf.attention.eager import attend_eager
from blend.hf.attention.fa4 import attend_fa4, fa4_refuses
from blend.hf.attention.flash import attend_flash, flash_refuses
from blend.hf.attention.flex import attend_flex, flex_refuses
from blend.hf.attention.gemm import attend_gemm
from blend.hf.attention.mask import FusionMask, Reach
from blend.hf.attention.missing import BackendMissing
from blend.hf.attention.whole import attend_whole

__all__ = ["BACKENDS", "REFUSES", "SETTING", "choose_backend"]

SETTING = "KVBLEND_ATTENTION"
"""Environment variable that names the backend."""

BACKENDS: dict[str, Callable[..., Tensor]] = {
    "gemm": attend_gemm,
    "blocked": attend_blocked,
    "eager": attend_eager,
    "fa4": attend_fa4,
    "flash": attend_flash,
    "flex": attend_flex,
    "sdpa": attend_whole,
}
"""Attention over selected rows, by name; all with the signature of :func:`attend_eager`."""

REFUSES: dict[str, Callable[[Tensor, Tensor], str | None]] = {
    "fa4": fa4_refuses,
    "flash": flash_refuses,
    "flex": flex_refuses,
}
"""Why a backend cannot serve a query and value such as these, or None; the others serve all. Fastest first."""

TOLERANCE = 2e-2  # of the largest number of a result; bf16 rounds to 4e-3


def choose_backend(query: Tensor, value: Tensor, softcap: bool = False, sinks: bool = False) -> str:
    """The backend for such a call; every one of them takes any reach, softcap and sinks.

    Raises:
        BackendMissing: ``KVBLEND_ATTENTION`` names a backend that is not known, or cannot serve this call.
    """
    if named := os.environ.get(SETTING):
        return _named(named, query, value)
    if query.device.type == "cpu":
        return "gemm" if query.dtype == torch.bfloat16 and _has_bf16_gemm() else "blocked"
    if query.device.type != "cuda":
        return "blocked"
    heads = query.shape[1], value.shape[1], query.shape[3], value.shape[3]
    return _fastest(_Kind(query.device, query.dtype, *heads, softcap, sinks))


def _named(name: str, query: Tensor, value: Tensor) -> str:
    if name not in BACKENDS:
        raise BackendMissing(f"{SETTING} is {name!r}: choose from {', '.join(BACKENDS)}, or leave it unset")
    why = REFUSES[name](query, value) if name in REFUSES else None
    if why:
        raise BackendMissing(f"{SETTING} is {name!r}, but {why}; leave it unset to have one chosen that serves")
    return name


@cache
def _has_bf16_gemm() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class _Kind(NamedTuple):
    """What the choice depends on."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    softcap: bool
    sinks: bool


@cache
def _fastest(kind: _Kind) -> str:
    query, _, value, _ = _example(kind)
    serving = (name for name, refuses in REFUSES.items() if refuses(query, value) is None)
    return next((name for name in serving if _proven(name, kind)), "sdpa")


def _proven(name: str, kind: _Kind) -> bool:
    """Whether the backend agrees with the specification on a small example; warns where it does not."""
    try:
        off = _difference(BACKENDS[name], kind)
    except Exception as error:  # whatever a foreign kernel raises, another one serves
        why = f"{type(error).__name__}: {error}"
    else:
        if off <= TOLERANCE:
            return True
        why = f"it is off by {off:.1e}"
    warnings.warn(f"attention backend {name!r} is left out on {kind.device}: {why}", RuntimeWarning, stacklevel=2)
    return False


def _difference(attend: Callable[..., Tensor], kind: _Kind) -> float:
    """Largest difference from the specification, over the largest number of its result; nan counts as infinite."""
    query, key, value, mask = _example(kind)
    # Low enough, and high enough, to show.
    scaling, softcap = kind.dim**-0.5, 1.0 if kind.softcap else None
    sinks = torch.full((kind.heads,), 6.0, device=kind.device) if kind.sinks else None
    worst = 0.0
    for reach in (Reach(), Reach(window=200)):
        given = query, key, value, mask
        truth = attend_eager(*given, scaling=scaling, reach=reach, softcap=softcap, sinks=sinks).float()
        got = attend(*given, scaling=scaling, reach=reach, softcap=softcap, sinks=sinks).float()
        off = float((got - truth).abs().max() / truth.abs().max())
        worst = max(worst, off if off == off else float("inf"))
    return worst


def _example(kind: _Kind) -> tuple[Tensor, Tensor, Tensor, FusionMask]:
    """Rows alone and side by side, in more than one block of rows and of keys. Draws no number from a shared stream."""
    total = 600
    rows = torch.cat([torch.arange(0, 400, 2), torch.arange(450, total)]).to(kind.device)
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (kind.heads, len(rows), kind.dim),
        (kind.kv_heads, total, kind.dim),
        (kind.kv_heads, total, kind.value_dim),
    )
    draws = (torch.randn(1, *shape, generator=generator).to(kind.device, kind.dtype) for shape in shapes)
    query, key, value = draws
    return query, key, value, FusionMask(rows, total, Reach())
