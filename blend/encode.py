"""Encoding: each chunk's KV, computed ahead of any question: alone, as a mean over contexts, or behind itself.

::

    alone    | prelude | chunk |
    mean     | prelude | context 1 | chunk |      each chunk's rows are turned to where they would
             | prelude | context 2 | chunk |      stand behind the prelude, and their mean is kept
             ...
    again    | prelude | chunk | chunk |          the second copy, turned there too

Chunks of similar length share a batch, padded on the right: with causal attention what stands behind a row cannot
change it, so no padding mask is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from blend.averaging import Mean
from blend.background import NO_BACKGROUND, Background
from blend.chunk import Chunk, ChunkKV, KVLayers, Retention
from blend.clock import Clock
from blend.errors import PromptTooLong
from blend.hf.view import ModelView
from blend.keys import chunk_key
from blend.readings import AGAIN

__all__ = ["EncodePlan", "Lead", "batches", "encode_chunks", "has_room_again", "require_room"]


class EncodePlan(NamedTuple):
    """What all chunks of one call share.

    Attributes:
        prelude: token ids that every chunk is encoded behind.
        fingerprint: of model and tokenizer, part of every key.
        salt: tenant salt, part of every key.
        batch_rows: rows (padding included) per forward pass; one chunk always goes, however long.
        codec: what the store's codec loses, by name, part of every key.
        adapter: id of the model's adapter, part of every key.
        background: what the KV is averaged over, part of every key.
        again: behind the chunk itself; part of every key.
    """

    prelude: tuple[int, ...]
    fingerprint: str
    salt: str = ""
    batch_rows: int = 1024
    codec: str = "none"
    adapter: str = ""
    background: Background = NO_BACKGROUND
    again: bool = False

    def key(self, chunk: Chunk) -> str:
        """Content key of ``chunk`` under this plan."""
        return chunk_key(
            self.fingerprint,
            self.prelude,
            chunk.ids,
            self.salt,
            codec=self.codec,
            adapter=self.adapter,
            background=AGAIN if self.again else self.background.digest,
        )


class Lead(NamedTuple):
    """What stands before a chunk while it is encoded.

    Attributes:
        ids: token ids, those of the prelude first.
        kv: their exact KV; None to compute it with every batch.
    """

    ids: tuple[int, ...]
    kv: KVLayers | None = None

    def first(self, rows: int) -> Lead:
        """The first rows of it: what stands behind a row does not change its KV."""
        if rows >= len(self.ids):
            return self
        return Lead(self.ids[:rows], self.kv and tuple((keys[:, :rows], values[:, :rows]) for keys, values in self.kv))


def encode_chunks(
    view: ModelView, chunks: Sequence[Chunk], plan: EncodePlan, leads: Sequence[Lead] = ()
) -> Iterator[ChunkKV]:
    """Yields the KV of each chunk as its batch completes, shortest chunks first.

    Args:
        leads: the prelude, or, where the plan has a background, prelude and context for each of its contexts. By
            default both are computed with every batch. A context is cut where the model has no room for all of it; a
            chunk's length alone says where, so that its KV does not depend on what it shares a batch with.

    Raises:
        PromptTooLong: prelude and chunk together exceed the model's context; nothing is encoded then.
    """
    leads = leads or [Lead((*plan.prelude, *ids)) for ids in plan.background.contexts or ((),)]
    require_room(view, chunks, plan.prelude)
    by_length = sorted(chunks, key=len)
    if plan.again:
        for batch in batches(by_length, plan.batch_rows // 2):
            yield from _encode_batch_again(view, batch, plan, leads[0])
        return
    if not plan.background:
        for batch in batches(by_length, plan.batch_rows):
            yield from _encode_batch(view, batch, plan, leads[0])
        return
    for room, alike in groupby(by_length, lambda chunk: _room(view, len(plan.prelude), len(chunk))):
        fitting = [lead.first(room) for lead in leads]
        for batch in batches(list(alike), plan.batch_rows):
            yield from _average_batch(view, batch, plan, fitting)


def require_room(view: ModelView, chunks: Sequence[Chunk], prelude: Sequence[int]) -> None:
    """Raises :class:`PromptTooLong` where the model cannot hold the prelude and the longest of the chunks."""
    longest = max((len(chunk) for chunk in chunks), default=0) + len(prelude)
    if view.context is not None and longest > view.context:
        chunk = max(chunks, key=len)
        raise PromptTooLong(
            f"chunk {chunk.name!r} has {len(chunk)} tokens, {longest} with its prelude, and the model holds "
            f"{view.context}: split it into smaller chunks"
        )


def has_room_again(view: ModelView, prelude: int, rows: int) -> bool:
    """Whether the model can read a chunk of ``rows`` rows twice behind a prelude.

    Not where angles depend on the length of the pass: they would be those of the batch, and not of the chunk.
    """
    return not view.rope.by_length and _fits(view, prelude + rows, prelude + 2 * rows)


def batches(chunks: Sequence[Chunk], rows: int) -> Iterator[list[Chunk]]:
    """Chunks in ascending length as batches of at most so many rows, padding included, or of one chunk."""
    batch: list[Chunk] = []
    for chunk in chunks:  # ascending, so the newest is the longest
        if batch and (len(batch) + 1) * len(chunk) > rows:
            yield batch
            batch = []
        batch.append(chunk)
    if batch:
        yield batch


class _Pass(NamedTuple):
    """One batch behind one lead.

    Attributes:
        layers: ``[B, H, rows, D]``, rows from that of the lead on.
        base: rows of the lead.
        length: of the whole pass: the longest row of it chooses the RoPE regime, padding included.
        row_seconds: what a chunk's row took.
    """

    layers: KVLayers
    base: int
    length: int
    row_seconds: float

    def cut(self, index: int, rows: int, skip: int = 0) -> KVLayers:
        """KV of ``rows`` rows of one chunk behind its first ``skip``, ``[H, rows, D]``; shares memory with the pass."""
        own = slice(self.base + skip, self.base + skip + rows)
        return tuple((keys[index, :, own], values[index, :, own]) for keys, values in self.layers)


def _run(view: ModelView, batch: Sequence[Chunk], lead: Lead) -> _Pass:
    head = lead.ids if lead.kv is None else ()
    width = len(head) + max(len(chunk) for chunk in batch)
    ids_BT = torch.zeros(len(batch), width, dtype=torch.int64)
    for row, chunk in enumerate(batch):
        ids_BT[row, : len(head) + len(chunk)] = torch.tensor([*head, *chunk.ids])
    began = Clock.now(view.device)
    _, layers = view.prefill(ids_BT, lead.kv)
    row_seconds = (Clock.now(view.device) - began) / sum(map(len, batch))
    base = len(lead.ids)
    return _Pass(layers, base, base + width - len(head), row_seconds)


def _encode_batch(view: ModelView, batch: Sequence[Chunk], plan: EncodePlan, lead: Lead) -> Iterator[ChunkKV]:
    done = _run(view, batch, lead)
    for index, chunk in enumerate(batch):
        own = tuple((keys.clone(), values.clone()) for keys, values in done.cut(index, len(chunk)))
        cost = Retention(cost=done.row_seconds * len(chunk))
        yield ChunkKV(plan.key(chunk), plan.fingerprint, chunk.ids, plan.prelude, done.length, own, cost)


def _encode_batch_again(view: ModelView, batch: Sequence[Chunk], plan: EncodePlan, lead: Lead) -> Iterator[ChunkKV]:
    done = _run(view, [Chunk(chunk.ids * 2) for chunk in batch], lead)
    for index, chunk in enumerate(batch):
        turned, second = Mean(view.rope, len(plan.prelude), len(chunk)), done.base + len(chunk)
        turned.add(done.cut(index, len(chunk), skip=len(chunk)), second, done.length)
        yield ChunkKV(
            plan.key(chunk),
            plan.fingerprint,
            chunk.ids,
            plan.prelude,
            len(plan.prelude) + len(chunk),
            turned.layers(view.dtype),
            Retention(cost=done.row_seconds * 2 * len(chunk)),
            averaged=1,
        )


def _average_batch(
    view: ModelView, batch: Sequence[Chunk], plan: EncodePlan, leads: Sequence[Lead]
) -> Iterator[ChunkKV]:
    base = len(plan.prelude)
    means = [Mean(view.rope, base, len(chunk)) for chunk in batch]
    seconds = 0.0
    for lead in leads:
        done = _run(view, batch, lead)
        seconds += done.row_seconds
        for index, (mean, chunk) in enumerate(zip(means, batch, strict=True)):
            mean.add(done.cut(index, len(chunk)), done.base, done.length)
    for mean, chunk in zip(means, batch, strict=True):
        yield ChunkKV(
            plan.key(chunk),
            plan.fingerprint,
            chunk.ids,
            plan.prelude,
            base + len(chunk),
            mean.layers(view.dtype),
            Retention(cost=seconds * len(chunk)),
            averaged=len(leads),
            spread=mean.spread(),
        )


def _room(view: ModelView, base: int, rows: int) -> int:
    """Rows that a lead may have before a chunk of ``rows`` rows: the prelude's, and the context's as far as it goes.

    Half of what the model has left, or half of that, and so on: a few steps, so that most chunks share theirs.
    """
    room = ((view.context or 1 << 40) - base) // 2
    while room and not _fits(view, base + rows, base + room + rows):
        room //= 2
    return base + room


def _fits(view: ModelView, shorter: int, length: int) -> bool:
    """Whether the model holds a pass of ``length`` rows, and turns keys in it as in a ``shorter`` one."""
    if view.context is not None and length > view.context:
        return False
    # Tables that end somewhere, and those that turn otherwise beyond some length, say so length by length.
    return view.rope.serves(length) and view.rope.same_angles(shorter, length)
