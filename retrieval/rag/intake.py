"""Documents in and out: split, embedded and catalogued in small steps that each happen whole, their KV encoded behind.

An interruption loses the step under way, and nothing else: what is catalogued is not done again, and KV that is missing
is told from KV that is there.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blend import Blender, Chunk
from blend.progress import track
from retrieval.document import Document
from retrieval.embed import Embeds
from retrieval.errors import DocumentExists, SettingError, UnknownDocument
from retrieval.rag.catalogue import Catalogue, Draft
from retrieval.rag.settings import RagSettings
from retrieval.splitting import Splitter

__all__ = ["Changes", "Encode", "Intake", "distinct"]

Encode = Literal["background", "now", "never"]
"""When passages are encoded: while nobody asks, before the call returns, or by the first question that needs them."""

_STEP = 128  # passages that are embedded and catalogued together


class Changes(NamedTuple):
    """What a change of the documents has come to.

    Attributes:
        added: documents that are new.
        updated: documents with another text than before.
        unchanged: documents that were there as they are.
        removed: documents that are gone.
        passages: passages that were split off and embedded now.
        dropped: passages that are gone, and their KV with them.
        encoded: passages encoded now.
        pending: passages that are still to be encoded.
    """

    added: int = 0
    updated: int = 0
    unchanged: int = 0
    removed: int = 0
    passages: int = 0
    dropped: int = 0
    encoded: int = 0
    pending: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in self._asdict().items() if count) or "nothing changed"


class Intake:
    """Changes what a pipeline knows.

    Args:
        catalogue: where documents and passages are kept.
        blender: whose tokenizer counts, and whose store takes the KV.
        settings: how documents are split and passages written.
        embedder: makes the vectors; None without a dense index.
    """

    def __init__(self, catalogue: Catalogue, blender: Blender, settings: RagSettings, embedder: Embeds | None) -> None:
        assert blender.text is not None, "a pipeline is refused without a tokenizer"
        self._catalogue, self._blender, self._settings, self._embedder = catalogue, blender, settings, embedder
        self._text = blender.text

    def take(
        self, documents: Iterable[Document | str], known: Literal["refuse", "replace"], encode: Encode, progress: bool
    ) -> Changes:
        """Takes documents in.

        Args:
            known: what becomes of a document whose id is there with another text.
            encode: when their passages are encoded.
            progress: show bars.

        Raises:
            DocumentExists: two texts for one id, before anything is changed.
            SettingError: something that is no document, or cannot be split as the settings say.
        """
        _check(encode)
        wanted = distinct(documents)
        new, changed, same = self._sorted(wanted)
        if changed and known == "refuse":
            raise DocumentExists(
                f"a document {changed[0].id!r} is there with another text: use update, or give it another id"
            )
        counts = Counter(added=len(new), updated=len(changed), unchanged=len(same))
        with self._catalogue.change():
            for document in same:
                self._catalogue.describe(document)
        for step in self._steps(
            track([*changed, *new], total=len(changed) + len(new), label="indexing", show=progress)
        ):
            counts.update(self._put(step, sweep=bool(changed)))
        numbers = [number for document in wanted for number in self._catalogue.numbers_of(document.id)]
        counts.update(self.encode(numbers, encode, progress))
        return Changes(**counts)

    def remove(self, names: Iterable[str]) -> Changes:
        """Takes documents out, with the passages and KV that no other document has.

        Raises:
            UnknownDocument: one of them is not there; then all stay.
        """
        names = list(dict.fromkeys([names] if isinstance(names, str) else names))
        with self._catalogue.change():
            for name in names:
                self._catalogue.remove(name)
            dropped = self._sweep()
        return Changes(removed=len(names), dropped=dropped)

    def require(self, documents: Iterable[Document | str]) -> list[Document]:
        """The documents, if all of their ids are known.

        Raises:
            UnknownDocument: one is not.
        """
        wanted = distinct(documents)
        for document in wanted:
            if self._catalogue.document(document.id) is None:
                raise UnknownDocument(f"there is no document {document.id!r} to update: use add")
        return wanted

    def encode(self, numbers: Sequence[int], encode: Encode, progress: bool) -> Counter[str]:
        """Encodes passages that have no KV yet; returns how many were encoded, and how many still are to be."""
        chunks = [Chunk(ids) for ids in self._catalogue.ids(list(dict.fromkeys(numbers))).values()]
        system = self._settings.system
        if encode == "never" or not chunks:
            return Counter()
        if encode == "background":
            return Counter(pending=len(self._blender.encode_afterwards(chunks, system=system)))
        missing = self._blender.missing(chunks, system=system)  # so that what is there need not be read
        return Counter(encoded=self._blender.encode(missing, system=system, progress=progress).encoded)

    # --- helpers ----------------------------------------------------------------------------------

    def _sorted(self, documents: Iterable[Document]) -> tuple[list[Document], list[Document], list[Document]]:
        """New documents, those with another text than before, and those that are as they were."""
        piles: tuple[list[Document], list[Document], list[Document]] = [], [], []
        for document in documents:
            entry = self._catalogue.document(document.id)
            piles[0 if entry is None else 1 if entry.digest != document.digest else 2].append(document)
        return piles

    def _steps(self, documents: Iterable[Document]) -> Iterator[list[tuple[Document, list[Draft]]]]:
        """Documents and their passages, some hundred passages at a time."""
        step: list[tuple[Document, list[Draft]]] = []
        for document in documents:
            step.append((document, self._split(document)))
            if sum(len(drafts) for _, drafts in step) >= _STEP:
                yield step
                step = []
        if step:
            yield step

    def _split(self, document: Document) -> list[Draft]:
        def written(text: str) -> str:
            return self._settings.written(text, document.title, document.source)

        def count(text: str) -> int:
            return self._text.count(f"{written(text)}\n\n")

        drafts = []
        for piece in Splitter(count, self._settings.size, self._settings.overlap).split(document.text, document.kind):
            text = written(piece.text)
            digest, ids = hashlib.sha256(text.encode()).digest(), self._text.chunk(text).ids
            drafts.append(Draft(digest, piece.text, ids, piece.start, piece.end, document.page(piece.start)))
        return drafts

    def _put(self, step: Sequence[tuple[Document, list[Draft]]], sweep: bool) -> Counter[str]:
        vectors = self._vectors(step)
        with self._catalogue.change():
            for document, drafts in step:
                self._catalogue.put(document, [draft._replace(vector=vectors.get(draft.digest)) for draft in drafts])
            dropped = self._sweep() if sweep else 0
        return Counter(passages=len(vectors), dropped=dropped)

    def _vectors(self, step: Sequence[tuple[Document, list[Draft]]]) -> dict[bytes, NDArray[np.float32] | None]:
        """Vectors of the passages that are new, by digest."""
        texts = {
            draft.digest: self._settings.written(draft.text, document.title, document.source)
            for document, drafts in step
            for draft in drafts
        }
        known = self._catalogue.known(texts)
        new = [digest for digest in texts if digest not in known]
        if self._embedder is None:
            return dict.fromkeys(new)
        return dict(zip(new, self._embedder.encode([texts[digest] for digest in new]), strict=True))

    def _sweep(self) -> int:
        """Drops passages that no document has. Their KV goes first: what an interruption leaves is found again."""
        orphans = self._catalogue.orphans()
        self._blender.forget([Chunk(ids) for ids in orphans.values()], system=self._settings.system)
        self._catalogue.sweep(orphans)
        return len(orphans)


def distinct(documents: Iterable[Document | str]) -> list[Document]:
    """Documents, each id once.

    Raises:
        SettingError: something that is no document.
        DocumentExists: two texts for one id.
    """
    if isinstance(documents, Document | str):
        raise SettingError("a single document was given: put it into a list")
    by_id: dict[str, Document] = {}
    for number, given in enumerate(documents):
        if not isinstance(given, Document | str):
            raise SettingError(f"documents[{number}] is a {type(given).__name__}: give Document or text")
        document = Document(given) if isinstance(given, str) else given
        if by_id.setdefault(document.id, document).digest != document.digest:
            raise DocumentExists(f"two documents with different texts have the id {document.id!r}: give each its own")
    return list(by_id.values())


def _check(encode: str) -> None:
    choices: Collection[str] = ("background", "now", "never")
    if encode not in choices:
        raise SettingError(f"encode is {encode!r}: choose from {', '.join(choices)}")
