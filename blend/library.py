"""The chunks of a Blender ahead of any question: encoded, added from elsewhere, pinned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from blend.admission import admit_chunk, admit_ids
from blend.chunk import DEFAULT_PRIORITY, Chunk, ChunkKV, Retention
from blend.errors import ForeignKV, PromptError
from blend.progress import track
from blend.prompt import Prompt
from blend.readings import Wanted
from blend.setup import Setup
from blend.text import PromptText

__all__ = ["Encoded", "Library"]


class Encoded(NamedTuple):
    """What :meth:`Blender.encode` did: chunks encoded now, chunks that were there, rows and bytes added."""

    encoded: int
    reused: int
    rows: int
    nbytes: int


class Library:
    """What a Blender does before a question comes.

    Attributes:
        setup: model, store and keys.
        tokenizer: of the model, or None.
        text: turns text into chunks and prompts; None without a tokenizer.
        system: default instructions.
    """

    setup: Setup
    tokenizer: Any
    text: PromptText | None
    system: str

    def chunk(self, text: str, name: str = "") -> Chunk:
        """A passage as a chunk."""
        return self._text().chunk(text, name)

    def encode(
        self,
        chunks: Iterable[Chunk | str],
        *,
        system: str | tuple[int, ...] | None = None,
        progress: bool = False,
        priority: int = DEFAULT_PRIORITY,
        duration: float | None = None,
    ) -> Encoded:
        """Computes and stores the KV of chunks that are not in the store yet.

        Every finished batch is in the store; after an interruption a second call does the rest only. Chunks of one
        call that share half of their text are encoded behind themselves too (:mod:`blend.readings`).

        Args:
            chunks: chunks or texts; duplicates are encoded once.
            system: the system part that they will stand behind, as text or ids; None for the default.
            progress: show a bar.
            priority: 0 to 100, for stores that evict by priority.
            duration: seconds for which it holds; None for ever.

        Raises:
            PromptTooLong: a chunk that does not fit the model, before anything is encoded.
        """
        self.setup.view.require_ready()
        wanted, ids = self._chunks(chunks, system)
        admit_ids(self.setup.view, ids)
        for chunk in wanted:
            admit_chunk(self.setup.view, self.tokenizer, chunk)
        with self.setup.afterwards.request():
            return self._encode(wanted, ids, Retention(0.0, priority, duration), progress)

    def encode_afterwards(
        self, chunks: Iterable[Chunk | str], *, system: str | tuple[int, ...] | None = None
    ) -> list[Chunk]:
        """Encodes the chunks that are not in the store yet in the background, when no request is under way.

        :meth:`Blender.drain` waits for them. Returns the chunks that are left to encode.

        Raises:
            PromptTooLong: a chunk that does not fit the model, before anything is encoded.
        """
        self.setup.view.require_ready()
        wanted, ids = self._chunks(chunks, system)
        for chunk in wanted:
            admit_chunk(self.setup.view, self.tokenizer, chunk)
        missing = self.setup.missing(wanted, ids)
        self.setup.encode_afterwards(missing, ids)
        return missing

    def missing(self, chunks: Iterable[Chunk | str], *, system: str | tuple[int, ...] | None = None) -> list[Chunk]:
        """Those chunks whose KV is not in the store."""
        return self.setup.missing(*self._chunks(chunks, system))

    def forget(self, chunks: Iterable[Chunk | str], *, system: str | tuple[int, ...] | None = None) -> int:
        """Removes the KV of chunks from the store, and empties the prefix cache, which may hold their rows too.

        Returns how many of them the store held.
        """
        return self.setup.forget(*self._chunks(chunks, system))

    def known_rows(self, prompt: Prompt) -> int:
        """Rows of the longest beginning of a prompt whose exact KV is known, and that it would start from."""
        ids = prompt.ids[:-1]
        return self.setup.known_rows(ids) if self.setup.remembers(len(prompt)) else 0

    def add(self, kvs: Iterable[ChunkKV]) -> None:
        """Puts chunk KV that was computed elsewhere into the store.

        Raises:
            ForeignKV: one of them comes from another model, dtype or tokenizer; then none is stored.
        """
        kvs = list(kvs)
        for kv in kvs:
            if kv.fingerprint != self.setup.fingerprint:
                raise ForeignKV(
                    f"the KV of a chunk of {len(kv.ids)} tokens was made by {kv.fingerprint[:12]}, and this Blender is "
                    f"{self.setup.fingerprint[:12]}: model, dtype or tokenizer differ; encode the chunk here instead"
                )
        self.setup.store.put_many(kvs)

    def pin(self, chunks: Iterable[Chunk | str], *, system: str | tuple[int, ...] | None = None) -> int:
        """Keeps encoded chunks from being evicted; returns how many of them the store could pin."""
        pinned = [list(map(self.setup.store.pin, keys)) for keys in self._keys(chunks, system)]
        return sum(all(of_chunk[:2]) for of_chunk in pinned)  # few chunks are kept behind themselves

    def unpin(self, chunks: Iterable[Chunk | str], *, system: str | tuple[int, ...] | None = None) -> int:
        """Takes one pin off each chunk; returns how many had one."""
        unpinned = [list(map(self.setup.store.unpin, keys)) for keys in self._keys(chunks, system)]
        return sum(map(any, unpinned))

    # --- helpers ----------------------------------------------------------------------------------

    def _text(self) -> PromptText:
        if self.text is None:
            raise PromptError(
                "this Blender has no tokenizer: build Prompt and Chunk from token ids, or pass tokenizer="
            )
        return self.text

    def _chunks(
        self, chunks: Iterable[Chunk | str], system: str | tuple[int, ...] | None
    ) -> tuple[list[Chunk], tuple[int, ...]]:
        """Distinct chunks, and the ids of the system part they stand behind."""
        wanted = dict.fromkeys(c if isinstance(c, Chunk) else self.chunk(c) for c in chunks)
        return list(wanted), system if isinstance(system, tuple) else self._system_ids(system)

    def _system_ids(self, system: str | None) -> tuple[int, ...]:
        return self._text().system_ids(self.system if system is None else system)

    def _keys(self, chunks: Iterable[Chunk | str], system: str | tuple[int, ...] | None) -> list[tuple[str, ...]]:
        wanted, ids = self._chunks(chunks, system)
        return [self.setup.keys(chunk, ids) for chunk in wanted]

    def _encode(
        self, chunks: Sequence[Chunk], system: tuple[int, ...], retention: Retention, progress: bool
    ) -> Encoded:
        setup = self.setup
        again = frozenset(setup.overlapping(chunks, system))
        wanted = [Wanted(chunk, reading) for chunk in chunks for reading in setup.readings(chunk in again)]
        known = setup.fetch(wanted, system)
        missing = list(dict.fromkeys(want.chunk for want in wanted if want not in known))
        encoded = rows = nbytes = 0
        done = setup.encode_fully(missing, system, retention, again) if missing else iter(())
        for entries in track(done, total=len(missing), label="encoding", show=progress):
            fresh = [found.kv for found in entries if found.encoded]
            encoded += bool(fresh)
            rows += sum(len(kv.ids) for kv in fresh)
            nbytes += sum(kv.nbytes for kv in fresh)
        return Encoded(encoded, len(chunks) - encoded, rows, nbytes)
