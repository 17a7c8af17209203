"""What the KV of a chunk depends on besides the chunk: how it is encoded, and the names it is stored under."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from blend.background import NO_BACKGROUND, Background
from blend.chunk import Chunk
from blend.encode import EncodePlan, has_room_again
from blend.hf.view import ModelView
from blend.prompt import Prompt
from blend.readings import Reading, Run, overlapping, repeated_runs
from blend.stores import Store
from blend.stores.codecs import codec_by_name

__all__ = ["Naming", "Prelude"]

Prelude = Literal["none", "bos", "system"]


@dataclass(frozen=True, kw_only=True)
class Naming:
    """Everything in a chunk's key but its tokens and the prompt's system part.

    Attributes:
        view: the model.
        store: chunk KV; what its codec loses is part of a key.
        fingerprint: of model and tokenizer.
        prelude: what chunks are encoded behind.
        bos: the tokenizer's BOS ids, for ``prelude="bos"``.
        salt: tenant salt.
        batch_rows: rows per encoding pass; no part of a key.
        adapter: id of the adapter that the model runs with.
        background: what chunks are averaged over; without, all are encoded alone.
    """

    view: ModelView
    store: Store
    fingerprint: str
    prelude: Prelude = "system"
    bos: tuple[int, ...] = ()
    salt: str = ""
    batch_rows: int = 1024
    adapter: str = ""
    background: Background = NO_BACKGROUND

    @property
    def lossless(self) -> bool:
        """Whether the store gives back the very bits."""
        return codec_by_name(self.store.codec).lossless

    def plan(self, system: tuple[int, ...], reading: Reading = "mean") -> EncodePlan:
        """How the chunks of a prompt with this system part are encoded and named; without background, all alone."""
        prelude = {"none": (), "bos": self.bos, "system": system}[self.prelude]
        loss = codec_by_name(self.store.codec).loss
        again = reading == "again" and bool(self.background)
        background = self.background if reading == "mean" else NO_BACKGROUND
        return EncodePlan(prelude, self.fingerprint, self.salt, self.batch_rows, loss, self.adapter, background, again)

    def keys(self, chunk: Chunk, system: tuple[int, ...]) -> tuple[str, ...]:
        """Of all that may be kept of a chunk: alone, its mean over the background, and behind itself."""
        return tuple(self.plan(system, reading).key(chunk) for reading in self.readings(again=True))

    def readings(self, again: bool) -> tuple[Reading, ...]:
        """What is kept of a chunk, and of one that overlaps with others; without background, one reading is all."""
        if not self.background:
            return ("mean",)
        return ("alone", "mean", "again") if again else ("alone", "mean")

    def repeats(self, prompt: Prompt) -> dict[int, tuple[Run, ...]]:
        """Rows that are to be taken from their chunk's KV behind itself (:mod:`blend.readings`), by its index."""
        runs = repeated_runs(prompt) if self.background else {}
        return {i: rows for i, rows in runs.items() if self._rereads(prompt.chunks[i], prompt.system)}

    def overlapping(self, chunks: Sequence[Chunk], system: tuple[int, ...]) -> list[Chunk]:
        """Those that will be read behind themselves in prompts in which they come together."""
        return [c for c in overlapping(chunks) if self._rereads(c, system)] if self.background else []

    def _rereads(self, chunk: Chunk, system: tuple[int, ...]) -> bool:
        return has_room_again(self.view, len(self.plan(system).prelude), len(chunk))
