"""Selectors that look at nothing but the layout: full reuse, full recompute, random rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from blend.selectors.base import BudgetedSelector, Candidates, Selector

__all__ = ["FullRecompute", "FullReuse", "Random"]


@dataclass(frozen=True)
class FullReuse(Selector):
    """Nothing is computed again: moved KV as it is (the lower bound of every method)."""

    name: ClassVar[str] = "full-reuse"

    def choose(self, candidates: Candidates) -> Tensor:
        return candidates.stale[:0]


@dataclass(frozen=True)
class FullRecompute(Selector):
    """Every reused row is computed again: full prefill through the fusion path (the upper bound)."""

    name: ClassVar[str] = "full-recompute"

    def choose(self, candidates: Candidates) -> Tensor:
        return candidates.stale


@dataclass(frozen=True)
class Random(BudgetedSelector):
    """A random subset, the same for the same ``seed`` and layout: what choosing well must beat."""

    name: ClassVar[str] = "random"
    seed: int = 0

    def choose(self, candidates: Candidates) -> Tensor:
        count = candidates.stale.numel()
        generator = torch.Generator().manual_seed(self.seed)
        chosen = torch.randperm(count, generator=generator)[: self.budget(count)]
        return candidates.stale[chosen.sort().values]
