"""FusionRAG: passages repaired offline by their neighbours, and online where the question looks (arXiv:2601.12904)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from blend import Blender, QueryAttention, Selector
from eval.systems.base import Case, System
from eval.systems.fusing import fused
from eval.systems.offline import InContext, fused_in_context

__all__ = ["SIMILAR", "fusionrag", "fusionrag_online", "prophetkv_offline"]

SIMILAR = InContext(neighbours=10)
"""The paper's offline stage: ten neighbours by embedding; it finds fifteen too many. One copy of each chunk is kept."""


def fusionrag_online(ratio: float) -> System:
    """FusionRAG's online half alone, over plain chunk KV: rows that the question attends to in the final layer.

    The question runs over the stale KV; the final layer's attention is summed over its rows, and the highest rows of
    all chunks together are computed again (SIGMOD 2026, arXiv:2601.12904). The recipe ranks by query times cached key;
    what can be watched here are softmax weights, averaged over heads. Left open: its kernel for selected queries, and
    its way of finding exact prefixes (ours takes the longest, as ever).
    """
    return fused("fusionrag-online", "FusionRAG online", f"{ratio:g}", _final_layer(ratio))


def fusionrag(ratio: float) -> System:
    """FusionRAG: as :func:`fusionrag_online`, over KV that each chunk got offline behind its ten nearest passages.

    Offline every chunk is encoded behind the system part and the neighbours' plain KV, moved into one context and not
    repaired (arXiv:2601.12904). The embedder is the run's, not the paper's BGE-M3, and the nearest stands first, which
    the recipe leaves open. The chunk that stands first in a prompt is no longer exact, as it is with plain KV.
    """
    return fused_in_context("fusionrag", "FusionRAG", f"{ratio:g}", SIMILAR, _final_layer(ratio))


def prophetkv_offline(ratio: float) -> System:
    """ProphetKV's choice (arXiv:2602.02579) over FusionRAG's offline KV: what each half is worth."""
    return fused_in_context("prophetkv-offline", "ProphetKV offline", f"{ratio:g}", SIMILAR, QueryAttention(ratio))


def _final_layer(ratio: float) -> Callable[[Blender, Case], Selector]:
    """Question attention of the last layer that has KV of its own."""
    everywhere = QueryAttention(ratio)  # a ratio out of range is told now
    return lambda blender, case: replace(everywhere, layers=(len(blender.view.kv_like) - 1,))
