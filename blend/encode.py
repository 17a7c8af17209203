"""Encoding: each chunk's KV, computed once behind its prelude.

Chunks of similar length share a batch, padded on the right: with causal attention what stands behind a row cannot
change it, so no padding mask is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from blend.chunk import Chunk, ChunkKV, KVLayers, Retention
from blend.clock import Clock
from blend.errors import PromptTooLong
from blend.hf.view import ModelView
from blend.keys import chunk_key

__all__ = ["EncodePlan", "encode_chunks"]


class EncodePlan(NamedTuple):
    """What all chunks of one call share.

    Attributes:
        prelude: token ids that every chunk is encoded behind.
        fingerprint: of model and tokenizer, part of every key.
        salt: tenant salt, part of every key.
        batch_rows: rows (padding included) per forward pass; one chunk always goes, however long.
        codec: what the store's codec loses, by name, part of every key.
        adapter: id of the model's adapter, part of every key.
    """

    prelude: tuple[int, ...]
    fingerprint: str
    salt: str = ""
    batch_rows: int = 1024
    codec: str = "none"
    adapter: str = ""

    def key(self, chunk: Chunk) -> str:
        """Content key of ``chunk`` under this plan."""
        return chunk_key(self.fingerprint, self.prelude, chunk.ids, self.salt, codec=self.codec, adapter=self.adapter)


def encode_chunks(
    view: ModelView, chunks: Sequence[Chunk], plan: EncodePlan, prelude_kv: KVLayers | None = None
) -> Iterator[ChunkKV]:
    """Yields the KV of each chunk as its batch completes, shortest chunks first.

    Args:
        prelude_kv: exact KV of the prelude; without it the prelude is computed with every batch.

    Raises:
        PromptTooLong: prelude and chunk together exceed the model's context; nothing is encoded then.
    """
    longest = max((len(c) for c in chunks), default=0) + len(plan.prelude)
    if view.context is not None and longest > view.context:
        chunk = max(chunks, key=len)
        raise PromptTooLong(
            f"chunk {chunk.name!r} has {len(chunk)} tokens, {longest} with its prelude, and the model holds "
            f"{view.context}: split it into smaller chunks"
        )
    for batch in _batches(sorted(chunks, key=len), plan.batch_rows):
        yield from _encode_batch(view, batch, plan, prelude_kv)


def _batches(chunks: Sequence[Chunk], rows: int) -> Iterator[list[Chunk]]:
    batch: list[Chunk] = []
    for chunk in chunks:  # ascending, so the newest is the longest
        if batch and (len(batch) + 1) * len(chunk) > rows:
            yield batch
            batch = []
        batch.append(chunk)
    if batch:
        yield batch


def _encode_batch(
    view: ModelView, batch: list[Chunk], plan: EncodePlan, prelude_kv: KVLayers | None
) -> Iterator[ChunkKV]:
    head: tuple[int, ...] = () if prelude_kv is not None else plan.prelude
    width = len(head) + max(len(chunk) for chunk in batch)
    ids_BT = torch.zeros(len(batch), width, dtype=torch.int64)
    for row, chunk in enumerate(batch):
        ids_BT[row, : len(head) + len(chunk)] = torch.tensor([*head, *chunk.ids])
    began = Clock.now(view.device)
    _, layers = view.prefill(ids_BT, prelude_kv)
    row_seconds = (Clock.now(view.device) - began) / sum(map(len, batch))
    base = len(plan.prelude)
    for row, chunk in enumerate(batch):
        stop = base + len(chunk)
        own = tuple((keys[row, :, base:stop].clone(), values[row, :, base:stop].clone()) for keys, values in layers)
        cost = Retention(cost=row_seconds * len(chunk))
        # The RoPE regime was chosen by the longest row of the pass, padding included.
        length = base + width - len(head)
        yield ChunkKV(plan.key(chunk), plan.fingerprint, chunk.ids, plan.prelude, length, own, cost)
