"""Attention of selected rows over all rows: the specification, the fast version, and the way into transformers."""

from blend.hf.attention.blocked import attend_blocked
from blend.hf.attention.eager import attend_eager
from blend.hf.attention.gemm import attend_gemm
from blend.hf.attention.interface import BACKENDS, Attention, attach, attending, detach, stock_attention
from blend.hf.attention.mask import FusionMask, Observer, Reach

__all__ = [
    "BACKENDS",
    "Attention",
    "FusionMask",
    "Observer",
    "Reach",
    "attach",
    "attend_blocked",
    "attend_eager",
    "attend_gemm",
    "attending",
    "detach",
    "stock_attention",
]
