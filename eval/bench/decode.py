"""Decoding behind fused KV against decoding behind a full prefill's: the same tokens, step by step in turn.

Each side has the cache that its users have: the model's own after its own prefill, and the one that a fusion hands
over. Both hold the same rows, and both are fed the full prefill's answer, so both do the same work.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blend import Fusion
from rope.hf import cache_argument

__all__ = ["Decoded", "compare_decoding"]


@dataclass(frozen=True)
class Decoded:
    """Seconds of each step behind fused KV and behind a full prefill's."""

    fused: tuple[float, ...]
    full: tuple[float, ...]

    @property
    def tokens(self) -> int:
        return len(self.fused)

    @property
    def ratio(self) -> float:
        """Decode time behind fused KV over that behind a full prefill's: the median over the steps."""
        return statistics.median(a / b for a, b in zip(self.fused, self.full, strict=True))

    @staticmethod
    def step_ms(seconds: tuple[float, ...]) -> float:
        """The median step."""
        return statistics.median(seconds) * 1e3

    def as_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "fused_ms": self.step_ms(self.fused),
            "full_ms": self.step_ms(self.full),
            "ratio": self.ratio,
        }


@torch.inference_mode()
def compare_decoding(fusion: Fusion, tokens: int) -> Decoded:
    """Decodes ``tokens`` steps behind both; one prefill of the whole prompt goes before them."""
    model: Any = fusion.view.model
    ids_1T = torch.tensor([fusion.prompt.ids], device=fusion.view.device)
    prefilled = model(input_ids=ids_1T[:, :-1], use_cache=True, logits_to_keep=1)
    (name,) = cache_argument(model, None)  # the result calls it as the argument is called
    caches = {"fused": fusion.cache, "full": getattr(prefilled, name)}
    seconds: dict[str, list[float]] = {"fused": [], "full": []}
    token_11 = ids_1T[:, -1:]
    for step in range(tokens + 1):
        logits: dict[str, Tensor] = {}
        for side in sorted(caches, reverse=step % 2 == 0):  # each goes first every other time
            started = time.perf_counter()
            out = model(input_ids=token_11, use_cache=True, **{name: caches[side]})
            logits[side] = out.logits[:, -1]
            logits[side].argmax().item()
            if step:  # the first step pays for what is set up once
                seconds[side].append(time.perf_counter() - started)
        token_11 = logits["full"].argmax(dim=-1, keepdim=True)
    return Decoded(tuple(seconds["fused"]), tuple(seconds["full"]))
