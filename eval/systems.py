"""The ways to get from a prompt to its first token that are compared, by name. Knows nothing of how they are judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from blend import Blender, FirstK, FullReuse, Fusion, KVBlendError, KVDeviation, Prompt, QueryAttention, Selector
from blend.fuse import prefill
from blend.prefix import RadixPrefixCache

__all__ = ["SYSTEMS", "System", "UnknownSystem", "make_systems"]


class UnknownSystem(KVBlendError, ValueError):
    """A system's name that does not exist; the message lists those that do."""


@dataclass(frozen=True)
class System:
    """One way to answer.

    Attributes:
        name: its key in :data:`SYSTEMS` and in JSON files.
        title: what a table calls it.
        run: from a prompt to the KV of its rows and the last row's logits; ``report.ttft`` is what it took.
    """

    name: str
    title: str
    run: Callable[[Blender, Prompt], Fusion]


def full() -> System:
    """Full prefill, the truth: the model's stock forward over all rows, logits of the last one; nothing is reused.

    With no past and no padding the model builds no mask, so stock SDPA takes its causal kernel: HF's best.
    """

    def run(blender: Blender, prompt: Prompt) -> Fusion:
        empty = replace(blender.setup, prefix=RadixPrefixCache(1))  # never the Blender's own: it may know the prompt
        return prefill(empty, prompt, "full prefill", remember=False)

    return System("full", "full prefill", run)


def prefix() -> System:
    """Plain prefix caching: the longest prefix of any prompt that this system has run before, exact.

    It keeps a prefix cache of its own. In the Blender's, the fusing systems would find the whole prompt that this one
    has just computed.
    """
    known = RadixPrefixCache()

    def run(blender: Blender, prompt: Prompt) -> Fusion:
        return prefill(replace(blender.setup, prefix=known), prompt, "prefix caching")

    return System("prefix", "prefix cache", run)


def fused(name: str, title: str, selector: Selector) -> System:
    """Fused chunk KV, repaired where ``selector`` says."""
    return System(name, title, lambda blender, prompt: blender.fuse(prompt, selector=selector))


SYSTEMS: dict[str, Callable[[float], System]] = {
    "full": lambda ratio: full(),
    "prefix": lambda ratio: prefix(),
    "reuse": lambda ratio: fused("reuse", "full reuse", FullReuse()),
    "cacheblend": lambda ratio: fused("cacheblend", "CacheBlend", KVDeviation(ratio)),
    "epic": lambda ratio: fused("epic", "EPIC", FirstK(ratio)),
    "prophetkv": lambda ratio: fused("prophetkv", "ProphetKV", QueryAttention(ratio)),
}
"""A fresh system by name, given the share of reused rows that it may compute again."""


def make_systems(names: Sequence[str], ratio: float) -> tuple[System, ...]:
    """Fresh systems, with empty caches of their own.

    Args:
        names: keys of :data:`SYSTEMS`.
        ratio: share of the reused rows computed again, in [0, 1]; for those that have a choice.

    Raises:
        UnknownSystem: a name that is not there.
        BudgetError: a ratio out of range.
    """
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown:
        raise UnknownSystem(f"there is no system {unknown[0]!r}: choose from {', '.join(SYSTEMS)}")
    return tuple(SYSTEMS[name](ratio) for name in names)
