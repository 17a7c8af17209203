"""kvboost (MIT, alpha): KV of 128-token pieces, found by content, on our own loaded model. Read in version 0.9.0.

What it does, so that its figures can be read: pieces lie on a grid that begins with the prompt; each was encoded alone;
one that is found at another place keeps its old rotation; the first piece that is not found ends the reuse; and where a
piece was found by content alone, a full forward runs over all of them, of which the share ``recompute_ratio`` is kept.
The clock behind its own ``ttft_ms`` starts after that forward, so it is timed from outside here.

It shows the first token's logits and no others, so there is no divergence along an answer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from blend import Blender, PromptError, Random
from blend.clock import Clock
from eval.systems.base import Case, Outcome, System
from eval.systems.peers.earlier import earlier_order, require

__all__ = ["Boosted", "kvboost"]

_INSTALL = "pip install --no-deps kvboost"
_BYTES = 4 << 30  # of its store; the smallest that its documentation sets


@dataclass(frozen=True, eq=False)
class Boosted(Outcome):
    """An answer of kvboost's.

    Attributes:
        engine: its engine, on our model.
        ids: of the prompt.
    """

    engine: Any
    ids: tuple[int, ...]
    ttft: float
    logits: Tensor
    row_layers: None = None

    @property
    def seconds(self) -> Mapping[str, float]:  # type: ignore[override]
        """One stage: it tells none apart."""
        return {"generate": self.ttft}

    def forced(self, answer: Sequence[int]) -> None:
        """Nothing: it shows the logits of one token only."""

    def decode(self, said: Sequence[int], tokens: int) -> tuple[int, ...]:
        new: list[int] = []
        ended = bool(said) and said[-1] == self.engine.tokenizer.eos_token_id
        if len(said) < tokens and not ended:
            _generate(self.engine, (*self.ids, *said), tokens - len(said), on_token=new.append)
        return (*said, *new)


def kvboost(ratio: float) -> System:
    """kvboost's chunk reuse with its defaults, warmed with the same passages in another order.

    Raises:
        ExtraMissing: it is not installed (when it is first asked to run).
    """
    Random(ratio)  # raises when out of range
    engine = cache(lambda blender: _engine(blender, ratio))

    def prepare(blender: Blender, case: Case) -> None:
        engine(blender).warm(list(earlier_order(case.prompt)))

    def run(blender: Blender, case: Case) -> Boosted:
        device, ticks = blender.view.device, list[float]()
        boosted = engine(blender)
        began = Clock.now(device)
        result = _generate(boosted, case.prompt.ids, 1, on_token=lambda token: ticks.append(time.perf_counter()))
        logits = torch.from_numpy(result.first_token_logits).float()
        return Boosted(boosted, case.prompt.ids, ticks[0] - began, logits.to(device))

    return System("kvboost", "kvboost", f"{ratio:g}", run, prepare)


def _engine(blender: Blender, ratio: float) -> Any:
    if blender.tokenizer is None:
        raise PromptError("kvboost needs a tokenizer, and this Blender has none: pass tokenizer=, or leave kvboost out")
    package = require("kvboost", _INSTALL)
    engine = package.KVBoost(
        blender.model,
        blender.tokenizer,
        max_cache_bytes=_BYTES,
        recompute_ratio=ratio,
        device=str(blender.view.device),
    )
    # It is given our very tokens: text would be tokenised otherwise at the seams.
    engine._encode = list
    return engine


def _generate(engine: Any, ids: Sequence[int], tokens: int, **options: Any) -> Any:
    """Greedy tokens. Nothing is kept of what it is asked, so asking again is no different from asking once."""
    return engine.generate(list(ids), max_new_tokens=tokens, do_sample=False, cacheable_prefix_len=0, **options)
