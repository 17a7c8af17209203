"""The exact systems: full prefill and prefix caching. What every other one is compared with."""

from __future__ import annotations

from dataclasses import replace

from blend import Blender, Fusion, Prompt
from blend.fuse import prefill
from blend.prefix import RadixPrefixCache
from eval.systems.base import Case, Fused, System

__all__ = ["full", "full_prefill", "prefix", "prefix_warm"]


def full(ratio: float) -> System:
    """Full prefill, the truth."""
    return System("full", "full prefill", "1", lambda blender, case: Fused(full_prefill(blender, case.prompt)))


def full_prefill(blender: Blender, prompt: Prompt) -> Fusion:
    """The model's stock forward over all rows, logits of the last one; nothing is reused.

    With no past and no padding the model builds no mask, so stock SDPA takes its causal kernel: HF's best.
    """
    empty = replace(blender.setup, prefix=RadixPrefixCache(1))  # never the Blender's own: it may know the prompt
    return prefill(empty, prompt, "full prefill", remember=False)


def prefix(ratio: float) -> System:
    """Plain prefix caching, cold: the longest prefix of any prompt that this system has run before, exact.

    It keeps a prefix cache of its own. In the Blender's, the fusing systems would find the whole prompt that this one
    has just computed.
    """
    known = RadixPrefixCache()

    def run(blender: Blender, case: Case) -> Fused:
        return Fused(prefill(replace(blender.setup, prefix=known), case.prompt, "prefix caching"))

    return System("prefix", "prefix cache", "1", run)


def prefix_warm(ratio: float) -> System:
    """Prefix caching at its best: another question over the same passages in the same order was asked before."""
    known = RadixPrefixCache()

    def prepare(blender: Blender, case: Case) -> None:
        context = Prompt(case.prompt.system, case.prompt.chunks, case.prompt.question[:1])
        prefill(replace(blender.setup, prefix=known), context, "prefix caching")

    def run(blender: Blender, case: Case) -> Fused:
        setup = replace(blender.setup, prefix=known)
        return Fused(prefill(setup, case.prompt, "prefix caching", remember=False))

    return System("prefix-warm", "prefix cache, warm", "1", run, prepare)
