"""What every request of one Blender shares, and the look-ups over it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from blend.chunk import Chunk, ChunkKV, KVLayers
from blend.encode import EncodePlan, encode_chunks
from blend.hf.view import ModelView
from blend.prefix import PrefixCache, PrefixHit
from blend.prompt import Prompt
from blend.stores import Store

__all__ = ["Found", "Prelude", "Setup"]

Prelude = Literal["none", "bos", "system"]


class Found(NamedTuple):
    """One chunk's KV and how it was come by."""

    kv: ChunkKV
    encoded: bool


@dataclass(frozen=True)
class Setup:
    """Model, caches and keys of one Blender.

    Attributes:
        view: the model.
        store: chunk KV.
        prefix: exact prefix KV.
        fingerprint: of model and tokenizer.
        prelude: what chunks are encoded behind.
        bos: the tokenizer's BOS ids, for ``prelude="bos"``.
        salt: tenant salt.
        batch_rows: rows per encoding pass.
        adapter: id of the adapter that the model runs with.
    """

    view: ModelView
    store: Store
    prefix: PrefixCache
    fingerprint: str
    prelude: Prelude = "system"
    bos: tuple[int, ...] = ()
    salt: str = ""
    batch_rows: int = 1024
    adapter: str = ""

    def plan(self, system: tuple[int, ...]) -> EncodePlan:
        """How the chunks of a prompt with this system part are encoded and named."""
        prelude = {"none": (), "bos": self.bos, "system": system}[self.prelude]
        return EncodePlan(prelude, self.fingerprint, self.salt, self.batch_rows, self.store.codec, self.adapter)

    def longest_prefix(self, prompt: Prompt) -> PrefixHit | None:
        """The longest exact prefix known, short of the last row.

        None where :meth:`remembers` says that no prefix can be exact.
        """
        return self.prefix.match(prompt.ids[:-1], extra=self.salt) if self.remembers(len(prompt)) else None

    def remembers(self, rows: int) -> bool:
        """Whether the KV of a pass of ``rows`` rows may be taken from the prefix cache, and go into it.

        Not where angles depend on the length of the pass (longrope; dynamic NTK beyond its original length).
        """
        rope = self.view.rope
        return not rope.by_length and rope.serves(rows)

    def fetch(self, chunks: Sequence[Chunk], system: tuple[int, ...]) -> dict[Chunk, ChunkKV]:
        """KV of those ``chunks`` that the store holds. Entries of another model count as misses."""
        plan = self.plan(system)
        entries = {chunk: self.store.get(plan.key(chunk)) for chunk in chunks}
        return {chunk: kv for chunk, kv in entries.items() if kv is not None and kv.fingerprint == self.fingerprint}

    def encode(self, chunks: Sequence[Chunk], system: tuple[int, ...]) -> Iterator[ChunkKV]:
        """Encodes chunks behind their prelude and puts each into the store as soon as its batch is done."""
        plan = self.plan(system)
        for kv in encode_chunks(self.view, chunks, plan, self._prelude_kv(plan.prelude)):
            self.store.put(kv)
            yield kv

    def _prelude_kv(self, prelude: tuple[int, ...]) -> KVLayers | None:
        """Exact KV of the prelude, computed once; also the first rows of every prompt that starts with it."""
        if not prelude or not self.remembers(len(prelude)):
            return None
        hit = self.prefix.match(prelude, extra=self.salt)
        if hit is not None and hit.rows == len(prelude):
            return hit.layers
        _, layers = self.view.prefill(torch.tensor([prelude]))
        own = tuple((keys[0], values[0]) for keys, values in layers)
        self.prefix.insert(prelude, own, extra=self.salt)
        return own
