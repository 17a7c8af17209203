"""Systems that choose by what the question looks at, over plain chunk KV, beyond ProphetKV itself."""

from __future__ import annotations

from dataclasses import replace

from blend import QueryAttention
from eval.systems.base import System
from eval.systems.fusing import fused

__all__ = ["a3"]


def a3(ratio: float) -> System:
    """A^3: rows that the question attends to most (arXiv:2511.17560).

    Only its abstract was at hand, which does not say at which layers. Ours are the last quarter, where what is read
    off the passages goes into the answer; all layers would be ProphetKV, and the final one FusionRAG's online half.
    """
    everywhere = QueryAttention(ratio)  # a ratio out of range is told now

    def last_quarter(depth: int) -> QueryAttention:
        return replace(everywhere, layers=tuple(range(depth * 3 // 4, depth)))

    return fused("a3", "A3", f"{ratio:g}", lambda blender, case: last_quarter(len(blender.view.kv_like)))
