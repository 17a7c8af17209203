"""The ways to get from a prompt to its first token that are compared, by name: one line each in :data:`SYSTEMS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from eval.systems.ape import ape
from eval.systems.averaged import cacheblend_averaged, epic_averaged, kvblend, prophetkv_averaged, reuse_averaged
from eval.systems.base import Case, Corpus, Fused, Outcome, System, UnknownSystem
from eval.systems.cachecraft import cachecraft
from eval.systems.exact import full, prefix, prefix_warm
from eval.systems.fusing import cacheblend, epic, epic16, prophetkv, random, reuse
from eval.systems.fusionrag import fusionrag, fusionrag_online, prophetkv_offline
from eval.systems.oracle import oracle_attention, oracle_kv
from eval.systems.peers import kvboost, llamacpp
from eval.systems.placed import reuse_unrotated
from eval.systems.question import a3
from eval.systems.weighted import agentkvshift, cacheblend_paper, kvshare

__all__ = [
    "DEMO",
    "OWN",
    "PEERS",
    "SYSTEMS",
    "Case",
    "Corpus",
    "Fused",
    "Outcome",
    "System",
    "UnknownSystem",
    "make_systems",
]

SYSTEMS: dict[str, Callable[[float], System]] = {
    "full": full,
    "prefix": prefix,
    "prefix-warm": prefix_warm,
    "kvblend": kvblend,
    "reuse": reuse,
    "reuse-unrotated": reuse_unrotated,
    "cacheblend": cacheblend,
    "cacheblend-paper": cacheblend_paper,
    "agentkvshift": agentkvshift,
    "kvshare": kvshare,
    "epic": epic,
    "epic-16": epic16,
    "prophetkv": prophetkv,
    "random": random,
    "a3": a3,
    "ape": ape,
    "fusionrag-online": fusionrag_online,
    "fusionrag": fusionrag,
    "prophetkv-offline": prophetkv_offline,
    "cachecraft": cachecraft,
    "reuse-averaged": reuse_averaged,
    "epic-averaged": epic_averaged,
    "cacheblend-averaged": cacheblend_averaged,
    "prophetkv-averaged": prophetkv_averaged,
    "oracle-kv": oracle_kv,
    "oracle-attention": oracle_attention,
    "kvboost": kvboost,
    "llamacpp": llamacpp,
}
"""A fresh system by name, given the share of reused rows that it may compute again."""

PEERS = ("kvboost", "llamacpp")
"""Other software, which has to be installed."""

OWN = tuple(name for name in SYSTEMS if name not in PEERS)
"""All that run with what kvblend itself needs."""

DEMO = ("full", "prefix", "reuse", "cacheblend", "epic", "prophetkv", "kvblend")
"""Those of the demo."""


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
