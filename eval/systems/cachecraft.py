"""Cache-Craft: chunk KV as an earlier request left it, repaired by what was noted down then (SIGMOD 2025).

Nothing is looked at online but the order of the chunks: the choice is made before any layer runs.

Shape suffixes: ``t`` rows of a chunk, ``J`` chunks of the context it was encoded in, ``T`` rows of that pass, ``H``
query heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from blend import Blender, Chunk, Fusion
from blend.selectors import BudgetedSelector, Candidates, top_rows
from blend.stores import Store
from eval.inside import watch_question
from eval.systems.base import Case, System
from eval.systems.offline import InContext, NotPrepared, fused_in_context

__all__ = ["EARLIER", "CacheCraft", "Note", "cachecraft", "need", "take_note"]

EARLIER = InContext(neighbours=4)
"""What stands in for a history of requests: one that retrieved the chunk along with the four passages most like it."""


class Note(NamedTuple):
    """The attention of a chunk's rows when its KV was made, mean over heads and layers.

    Attributes:
        context: the chunks before it.
        inter_tJ: of each row, the attention to each chunk of the context, fp32; none of it to the system part.
        intra: attention of the rows to their own chunk, summed.
    """

    context: tuple[Chunk, ...]
    inter_tJ: Tensor
    intra: float


_notes: WeakKeyDictionary[Store, dict[str, Note]] = WeakKeyDictionary()
"""Notes on the entries of each store, by key. They stay in memory, as long as the store, and serve every ratio; over KV
from another process the offline stage is run again."""


def take_note(fusion: Fusion) -> Note:
    """How the question of a fusion, a chunk in its context, attends to what stands before it.

    The chunk runs once more over the finished KV, with attention written out instead of the stock kernel.

    Raises:
        UnsupportedModel: the model's attention cannot be watched.
    """
    prompt, rows = fusion.prompt, len(fusion.prompt.question)
    seen_tT: list[Tensor] = []

    def observe(layer: int, weights_1HtT: Tensor) -> None:
        seen_tT.append(weights_1HtT.mean(dim=(0, 1)).cpu())

    watch_question(fusion, observe)
    mean_tT = torch.stack(seen_tT).mean(0)
    to_chunks = [
        mean_tT[:, start : start + len(chunk)].sum(1) for start, chunk in zip(prompt.starts, prompt.chunks, strict=True)
    ]
    inter_tJ = torch.stack(to_chunks, dim=1) if to_chunks else torch.zeros(rows, 0)
    return Note(prompt.chunks, inter_tJ, float(mean_tT[:, -rows:].sum()))


def need(note: Note, before: Sequence[Chunk]) -> float:
    """The share of a chunk that wants computing again behind ``before``, up to the factor alpha: ``CCI (1 - beta')``.

    * ``CCI = sigmoid(a / b)``: ``a`` is the attention to each earlier chunk over the product of both chunks' rows,
      summed over chunks; ``b`` is the attention within the chunk over its rows squared;
    * ``beta``: the share of the attention to earlier chunks that went to chunks which are there again;
    * ``beta' = beta (1 - gamma)``, where ``gamma`` is the share of pairs of these that changed order (Kendall's tau
      distance).
    """
    rows = note.inter_tJ.shape[0]
    mass = dict(zip(note.context, note.inter_tJ.sum(0).tolist(), strict=True))
    outward = sum(inter / (rows * len(chunk)) for chunk, inter in mass.items())
    context_index = 1 / (1 + math.exp(-outward / (note.intra / rows**2)))
    again = [chunk for chunk in dict.fromkeys(before) if chunk in mass]
    total = sum(mass.values())
    known = sum(mass[chunk] for chunk in again) / total if total else 0.0
    pairs = list(combinations([note.context.index(chunk) for chunk in again], 2))
    turned = sum(first > second for first, second in pairs) / len(pairs) if pairs else 0.0
    return context_index * (1 - known * (1 - turned))


@dataclass(frozen=True)
class CacheCraft(BudgetedSelector):
    """Rows of each chunk that attended most to other chunks, as many as its :func:`need` asks for.

    The method computes ``ceil(alpha * CCI * (1 - beta') * rows)`` rows of each chunk again, with alpha fitted to a
    quality on held-out questions. Here alpha is what spends the budget: rows are dealt to the chunks in proportion to
    their need times their rows (by Sainte-Laguë's method: whole numbers, and no chunk gets more than it has).

    Attributes:
        chunks: of the prompt.
        notes: on each of them.
    """

    name: ClassVar[str] = "cache-craft"
    chunks: tuple[Chunk, ...] = field(default=(), repr=False)
    notes: tuple[Note, ...] = field(default=(), repr=False, compare=False)

    def choose(self, candidates: Candidates) -> Tensor:
        turn_T = torch.zeros(candidates.layout.rows)
        for piece in candidates.layout.pieces:
            if piece.origin != "chunk" or piece.exact or piece.chunk is None:
                continue
            rows, note = piece.stop - piece.start, self.notes[piece.chunk]
            outward_t = note.inter_tJ.sum(1)[piece.skip : piece.skip + rows]
            rank_t = outward_t.argsort(descending=True, stable=True).argsort()
            turn_T[piece.start : piece.stop] = need(note, self.chunks[: piece.chunk]) * rows / (2 * rank_t + 1)
        return top_rows(candidates.stale, turn_T, self.budget(candidates.stale.numel()))


def cachecraft(ratio: float) -> System:
    """Cache-Craft (SIGMOD 2025), at the budget of the ratio.

    Each chunk's KV is what one earlier request left, in which it stood behind the four passages most like it; that
    stands in for a real history of requests. Left open: several variants of a chunk, of which the best fitting is
    taken; alpha by a quality wanted (see :class:`CacheCraft`); and dropping chunks that the question does not look at
    from the middle layers on. How attention to chunks of different lengths is normalised is our reading.
    """
    blind = CacheCraft(ratio)  # a ratio out of range is told now

    def prepare(blender: Blender, case: Case) -> None:
        EARLIER.learn_system(blender, case)
        notes = _notes.setdefault(blender.setup.store, {})
        for context in EARLIER.contexts(blender, case):
            (key,) = _keys(blender, context.system, [Chunk(context.question)])
            noted = key in notes and notes[key].context == context.chunks
            if not (noted and EARLIER.holds(blender, context)):
                notes[key] = take_note(EARLIER.encode(blender, context))

    def make(blender: Blender, case: Case) -> CacheCraft:
        notes = _notes.get(blender.setup.store, {})
        keys = _keys(blender, case.prompt.system, case.prompt.chunks)
        if missing := [key for key in keys if key not in notes]:
            raise NotPrepared(
                f"nothing was noted down on {len(missing)} of the prompt's {len(keys)} chunks: run the system's "
                "prepare over this case first"
            )
        return replace(blind, chunks=case.prompt.chunks, notes=tuple(notes[key] for key in keys))

    return replace(fused_in_context("cachecraft", "Cache-Craft", f"{ratio:g}", EARLIER, make), prepare=prepare)


def _keys(blender: Blender, system: tuple[int, ...], chunks: Sequence[Chunk]) -> list[str]:
    plan = EARLIER.tenant(blender).setup.plan(system)
    return [plan.key(chunk) for chunk in chunks]
