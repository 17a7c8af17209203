"""Systems that weigh what has changed: AgentKVShift, KVShare, and CacheBlend's gradual filtering."""

from __future__ import annotations

from blend import Blender, ChunkDeviation, KVDeviation, MeanShift, WeightedDeviation
from eval.systems.base import System
from eval.systems.fusing import fused

__all__ = ["agentkvshift", "cacheblend_paper", "kvshare"]

_STEPS = (1.3, 1.2, 1.1, 1.0)


def agentkvshift(ratio: float) -> System:
    """AgentKVShift: each chunk's most changed rows again, and their mean residual for its others (arXiv:2607.21604).

    The ratio is the budget of K- and V-probes together; as published, each has its own. The paper leaves open what the
    weights' divergence is relative to (here: nothing), whether it is a row's or a chunk's (here: a row's), and whether
    keys are averaged as rotated (here: yes).
    """
    return fused("agentkvshift", "AgentKVShift", f"{ratio:g}", ChunkDeviation(ratio), MeanShift())


def kvshare(ratio: float) -> System:
    """KVShare's weighting: the question's attention times the deviation of K and V at layer 1 (arXiv:2503.16525).

    Prefill only: the paper's second stage repairs rows while decoding. The paper leaves open how both are measured
    (here: attention over all layers, as ProphetKV has it, and L2 norms).
    """
    return fused("kvshare", "KVShare", f"{ratio:g}", WeightedDeviation(ratio))


def cacheblend_paper(ratio: float) -> System:
    """CacheBlend as its paper has it: filtered from layer to layer, by K and V (arXiv:2405.16444, section 4.3).

    The paper says that the first share is slightly above the ratio and that each is taken out of the one before;
    it leaves the numbers open. Here: 1.3, 1.2, 1.1 and 1.0 times the ratio, at layers 1 to 4.
    """
    return fused("cacheblend-paper", "CacheBlend (paper)", f"{ratio:g}", lambda blender, _: gradual(blender, ratio))


def gradual(blender: Blender, ratio: float) -> KVDeviation:
    """The filter of :func:`cacheblend_paper`, in fewer steps where the model has fewer layers."""
    count = min(len(_STEPS), len(blender.view.layers) - 1)
    return KVDeviation(ratio, on="both", layers=tuple(range(1, count + 1)), schedule=_STEPS[len(_STEPS) - count :])
