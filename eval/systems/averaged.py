"""Systems over averaged chunk KV: kvblend's own recipe, and what averaging alone does for published ones.

The offline stage encodes each chunk behind the bundled contexts as well, and keeps the mean under keys of its own: the
plain chunk KV, which all other systems read, stays what it is.
"""

from __future__ import annotations

from blend import Blender, Corrector, ExpectedError, FirstK, FullReuse, KVDeviation, MeanShift, QueryAttention, Selector
from eval.systems.base import Case, Fused, System

__all__ = ["cacheblend_averaged", "epic_averaged", "fused_averaged", "kvblend", "prophetkv_averaged", "reuse_averaged"]


def fused_averaged(
    name: str, title: str, setting: str, selector: Selector, corrector: Corrector | None = None
) -> System:
    """Fused averaged chunk KV, repaired where the selector says."""
    averaged = _Averaged()

    def run(blender: Blender, case: Case) -> Fused:
        return Fused(averaged.of(blender).fuse(case.prompt, selector=selector, corrector=corrector))

    def prepare(blender: Blender, case: Case) -> None:
        averaged.of(blender).encode(case.prompt.chunks, system=case.prompt.system)

    return System(name, title, setting, run, prepare)


def kvblend(ratio: float) -> System:
    """kvblend's default: averaged chunk KV, the rows with the largest expected error, a quarter of the mean residual.

    It is what a Blender does that is told nothing but the ratio.
    """
    return fused_averaged("kvblend", "kvblend", f"{ratio:g}", ExpectedError(ratio), MeanShift(weight=0.25))


def prophetkv_averaged(ratio: float) -> System:
    """ProphetKV's choice over averaged chunk KV: the recipe without spread and shift."""
    return fused_averaged("prophetkv-averaged", "ProphetKV, averaged", f"{ratio:g}", QueryAttention(ratio))


def reuse_averaged(ratio: float) -> System:
    """Full reuse of averaged chunk KV: nothing is computed again but the question."""
    return fused_averaged("reuse-averaged", "full reuse, averaged", "0", FullReuse())


def cacheblend_averaged(ratio: float) -> System:
    """CacheBlend's choice over averaged chunk KV."""
    return fused_averaged("cacheblend-averaged", "CacheBlend, averaged", f"{ratio:g}", KVDeviation(ratio))


def epic_averaged(ratio: float) -> System:
    """EPIC's choice over averaged chunk KV."""
    return fused_averaged("epic-averaged", "EPIC, averaged", f"{ratio:g}", FirstK(ratio))


class _Averaged:
    """The Blender that answers from averaged chunk KV, made once: it remembers the KV of the contexts."""

    def __init__(self) -> None:
        self._made: tuple[Blender, Blender] | None = None

    def of(self, blender: Blender) -> Blender:
        if self._made is None or self._made[0] is not blender:
            self._made = blender, blender.averaged(())
        return self._made[1]
