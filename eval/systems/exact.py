"""The exact systems: full prefill and prefix caching. What every other one is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from blend import Blender, Fusion, Prompt
from blend.fuse import prefill
from blend.prefix import RadixPrefixCache
from eval.systems.base import Case, Fused, System

__all__ = ["full", "full_prefill", "prefix", "prefix_warm"]


def full(ratio: float) -> System:
    """Full prefill, the truth."""

    def run(blender: Blender, case: Case) -> Fused:
        return Fused(full_prefill(blender, case.prompt))

    return System("full", "full prefill", "1", run, exact=True)


def full_prefill(blender: Blender, prompt: Prompt) -> Fusion:
    """The model's stock forward over all rows, logits of the last one; nothing is reused.

    With no past and no padding the model builds no mask, so stock SDPA takes its causal kernel: HF's best.
    """
    empty = replace(blender.setup, prefix=RadixPrefixCache(1))  # never the Blender's own: it may know the prompt
    return prefill(empty, prompt, "full prefill", remember=False)


def prefix(ratio: float) -> System:
    """Plain prefix caching, cold: the system part is known, and passages in this order are not. Exact.

    It keeps a prefix cache of its own, and learns nothing from what it runs: in the Blender's, the fusing systems would
    find the whole prompt, and figures would depend on what was run before.
    """
    known = RadixPrefixCache()

    def prepare(blender: Blender, case: Case) -> None:
        _learn(blender, known, case.prompt.system)

    return System("prefix", "prefix cache", "1", _behind(known), prepare, exact=True)


def prefix_warm(ratio: float) -> System:
    """Prefix caching at its best: another question over the same passages in the same order was asked before."""
    known = RadixPrefixCache()

    def prepare(blender: Blender, case: Case) -> None:
        rows = len(case.prompt) - len(case.prompt.question)
        _learn(blender, known, case.prompt.ids[:rows], case.truth)

    return System("prefix-warm", "prefix cache, warm", "1", _behind(known), prepare, exact=True)


def _learn(blender: Blender, known: RadixPrefixCache, ids: tuple[int, ...], truth: Fusion | None = None) -> None:
    """Leaves the KV of ``ids`` and nothing else in a prefix cache: of one pass, whatever was asked before.

    Args:
        truth: a full prefill that begins with ``ids``; it has their KV already.
    """
    known.evict(known.stats().nbytes)
    setup = replace(blender.setup, prefix=known)
    if truth is not None:
        setup.remember(ids, tuple((keys[:, : len(ids)], values[:, : len(ids)]) for keys, values in truth.layers))
    elif ids:
        prefill(setup, Prompt((), (), ids), "prefix caching")


def _behind(known: RadixPrefixCache) -> Callable[[Blender, Case], Fused]:
    def run(blender: Blender, case: Case) -> Fused:
        setup = replace(blender.setup, prefix=known)
        return Fused(prefill(setup, case.prompt, "prefix caching", remember=False))

    return run
