"""Attention of selected rows over all rows: the specification, the fast version, and the way into transformers."""

from blend.hf.attention.blocked import attend_blocked
from blend.hf.attention.eager import attend_eager
from blend.hf.attention.interface import BACKENDS, register
from blend.hf.attention.mask import FusionMask, Observer, Reach

__all__ = ["BACKENDS", "FusionMask", "Observer", "Reach", "attend_blocked", "attend_eager", "register"]
