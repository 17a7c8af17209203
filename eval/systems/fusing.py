"""Systems that are a selector over fused chunk KV."""

from __future__ import annotations

from collections.abc import Callable

from blend import Blender, Corrector, FirstK, FullReuse, KVDeviation, QueryAttention, Random, Selector
from eval.systems.base import Case, Fused, System

__all__ = ["cacheblend", "epic", "epic16", "fused", "prophetkv", "random", "reuse"]


def fused(
    name: str,
    title: str,
    setting: str,
    make: Callable[[Blender, Case], Selector] | Selector,
    corrector: Corrector | None = None,
) -> System:
    """Fused chunk KV, repaired where the selector says.

    Args:
        make: the selector, or what makes it from the case: it may look at the model and, for oracles, at the truth.
        corrector: what is done to the reused rows that the selector leaves.
    """

    def run(blender: Blender, case: Case) -> Fused:
        selector = make if isinstance(make, Selector) else make(blender, case)
        return Fused(blender.fuse(case.prompt, selector=selector, corrector=corrector))

    return System(name, title, setting, run)


def reuse(ratio: float) -> System:
    """Full reuse: moved KV as it is."""
    return fused("reuse", "full reuse", "0", FullReuse())


def cacheblend(ratio: float) -> System:
    """CacheBlend as its authors' code does it: one choice at layer 1, from values (arXiv:2405.16444)."""
    return fused("cacheblend", "CacheBlend", f"{ratio:g}", KVDeviation(ratio))


def epic(ratio: float) -> System:
    """EPIC / LegoLink at an equal budget: the first rows of every chunk, evenly (arXiv:2410.15332)."""
    return fused("epic", "EPIC", f"{ratio:g}", FirstK(ratio))


def epic16(ratio: float) -> System:
    """EPIC as published: the first 16 tokens of every chunk, whatever its length."""
    return fused("epic-16", "EPIC-16", "k=16", FirstK(k=16))


def prophetkv(ratio: float) -> System:
    """ProphetKV: rows that the question attends to, over all layers (arXiv:2602.02579)."""
    return fused("prophetkv", "ProphetKV", f"{ratio:g}", QueryAttention(ratio))


def random(ratio: float) -> System:
    """Random rows: what choosing well must beat."""
    return fused("random", "random rows", f"{ratio:g}", Random(ratio))
