"""Attention of selected rows over all rows: the specification, fast versions, and the way into transformers."""

from blend.hf.attention.blocked import attend_blocked
from blend.hf.attention.choice import BACKENDS, REFUSES, SETTING, choose_backend
from blend.hf.attention.eager import attend_eager
from blend.hf.attention.fa4 import attend_fa4
from blend.hf.attention.flash import attend_flash
from blend.hf.attention.flex import attend_flex
from blend.hf.attention.gemm import attend_gemm
from blend.hf.attention.interface import Attention, attach, attending, detach, stock_attention
from blend.hf.attention.mask import FusionMask, Observer, Reach
from blend.hf.attention.missing import BackendMissing
from blend.hf.attention.whole import attend_whole

__all__ = [
    "BACKENDS",
    "REFUSES",
    "SETTING",
    "Attention",
    "BackendMissing",
    "FusionMask",
    "Observer",
    "Reach",
    "attach",
    "attend_blocked",
    "attend_eager",
    "attend_fa4",
    "attend_flash",
    "attend_flex",
    "attend_gemm",
    "attend_whole",
    "attending",
    "choose_backend",
    "detach",
    "stock_attention",
]
