"""Chunk KV that has seen other passages: encoded offline behind its neighbours, and kept apart from the plain KV.

::

    plain       | system | chunk |
    in context  | system | neighbour 1 | ... | neighbour n | chunk |
                  known    plain KV, moved, none repaired    computed: these rows are stored

A later prompt moves them from where they stood, as it does with plain KV. Knows nothing of selectors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from blend import Blender, Chunk, ChunkKV, Fusion, KVBlendError, Prompt, Retention, Selector
from blend.chunk import DEFAULT_RETENTION
from blend.readings import Wanted
from blend.selectors import FullReuse
from blend.setup import Found, Setup
from eval.systems.base import Case, Fused, System

__all__ = ["InContext", "NotPrepared", "fused_in_context"]

_APPROXIMATE = -1
"""Stands in for the first id of a prelude whose KV was not exact. No prompt holds it, so in none does the chunk stand
behind its prelude, where it would pass for exact. The prelude keeps its length: the chunk's place is right."""


class NotPrepared(KVBlendError, ValueError):
    """A system is asked to answer, and its offline stage has not been run over the prompt's chunks."""


@dataclass(frozen=True)
class InContext:
    """KV of chunks as an earlier request leaves it, in which each stood behind the passages that are most like it.

    It lies in the Blender's store, under a tenant of its own for each number of neighbours.

    Attributes:
        neighbours: how many passages each chunk is encoded behind, the nearest first; fewer where the model's context
            or the corpus has no more.
    """

    neighbours: int

    def tenant(self, blender: Blender) -> Blender:
        """Who answers from this KV, and from nothing else: what is missing is never encoded without its context.

        Raises, when it answers:
            NotPrepared: a chunk whose KV in context is not in the store, or is damaged there.
        """
        plain = blender.averaged(None)  # a mean has no context of its own
        tenant = plain.tenant(f"{blender.setup.salt}\0in the context of {self.neighbours} neighbours")
        same: dict[str, Any] = {field.name: getattr(tenant.setup, field.name) for field in fields(Setup)}
        # The other settings encode plain KV in the background, or in place of what is slow to read.
        tenant.setup = _Prepared(**{**same, "on_miss": "encode", "loading": "plain"})
        return tenant

    def prepare(self, blender: Blender, case: Case) -> None:
        """Encodes those of the prompt's chunks that are not there; each is stored as soon as it is done.

        Neighbours' plain KV is taken from the Blender's store, and encoded where missing.

        Raises:
            NotPrepared: the case has no corpus, or the store takes no more.
            UnknownPassage: a chunk that the corpus does not know.
        """
        self.learn_system(blender, case)
        for context in self.contexts(blender, case):
            if not self.holds(blender, context):
                self.encode(blender, context)

    def learn_system(self, blender: Blender, case: Case) -> None:
        """Has the KV of the system part at hand for this tenant's prompts, as it is for others that have encoded."""
        self.tenant(blender).setup.learn_prelude(case.prompt.system, 0)

    def contexts(self, blender: Blender, case: Case) -> Iterator[Prompt]:
        """Each distinct chunk of the prompt, as the question behind its neighbours."""
        if case.corpus is None:
            raise NotPrepared("the offline stage looks beyond the prompt: give Case(..., corpus=) all passages")
        system = case.prompt.system
        for chunk in dict.fromkeys(case.prompt.chunks):
            nearest = case.corpus.neighbours(chunk, self.neighbours)
            context = blender.view.context
            room = None if context is None else context - len(system) - len(chunk)
            yield Prompt(system, _fitting(nearest, room), chunk.ids)

    def holds(self, blender: Blender, context: Prompt) -> bool:
        """Whether the store has the KV of the chunk in this very context."""
        chunk = Chunk(context.question)
        want = Wanted(chunk, "mean")
        kv = self.tenant(blender).setup.fetch([want], context.system).get(want)
        return kv is not None and kv.prelude in (_prelude(context, exact=True), _prelude(context, exact=False))

    def encode(self, blender: Blender, context: Prompt) -> Fusion:
        """Computes and stores the KV of a chunk in its context; returns the whole pass."""
        plain = blender.averaged(None)
        plain.encode(context.chunks, system=context.system)
        fusion = plain.fuse(context, selector=FullReuse())
        setup, chunk = self.tenant(blender).setup, Chunk(context.question)
        base = len(context) - len(chunk)
        layers = tuple((keys[:, base:].clone(), values[:, base:].clone()) for keys, values in fusion.layers)
        key, prelude = setup.plan(context.system).key(chunk), _prelude(context, fusion.exact)
        cost = Retention(cost=fusion.report.ttft)
        if not setup.store.put(ChunkKV(key, setup.fingerprint, chunk.ids, prelude, len(context), layers, cost)):
            raise NotPrepared(f"the store did not take the KV of a chunk of {len(chunk)} tokens: raise its limit")
        return fusion


def fused_in_context(
    name: str, title: str, setting: str, kv: InContext, make: Callable[[Blender, Case], Selector] | Selector
) -> System:
    """Fused chunk KV that was encoded in context, repaired where the selector says; see :func:`~eval.systems.fused`."""

    def run(blender: Blender, case: Case) -> Fused:
        selector = make if isinstance(make, Selector) else make(blender, case)
        return Fused(kv.tenant(blender).fuse(case.prompt, selector=selector))

    return System(name, title, setting, run, kv.prepare)


class _Prepared(Setup):
    """A setup that never encodes: whatever is missing is an error."""

    def encode(
        self,
        wanted: Iterable[Wanted],
        system: tuple[int, ...],
        retention: Retention = DEFAULT_RETENTION,
        stale: Collection[Wanted] = (),
    ) -> Iterator[Found]:
        chunks = [want.chunk for want in wanted]
        raise NotPrepared(
            f"{len(chunks)} of the prompt's chunks have no KV in context in the store (the first has "
            f"{len(chunks[0])} tokens): run the system's prepare over this case first"
        )


def _prelude(context: Prompt, exact: bool) -> tuple[int, ...]:
    """What the chunk stood behind, as its entry says it."""
    ids = context.ids[: len(context) - len(context.question)]
    return ids if exact or not ids else (_APPROXIMATE, *ids[1:])


def _fitting(nearest: Sequence[Chunk], room: int | None) -> tuple[Chunk, ...]:
    """The nearest that fit into ``room`` rows together; None has no end."""
    fitting: list[Chunk] = []
    for chunk in nearest:
        if room is not None and sum(map(len, fitting)) + len(chunk) > room:
            break
        fitting.append(chunk)
    return tuple(fitting)
