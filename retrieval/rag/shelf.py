"""The documents of a pipeline: added, updated, removed, counted. Knows nothing of questions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from blend import Blender, Chunk
from retrieval.document import Document
from retrieval.rag.catalogue import Catalogue, Entry
from retrieval.rag.finder import Finder
from retrieval.rag.intake import Changes, Encode, Intake, distinct
from retrieval.rag.settings import RagSettings

__all__ = ["Shelf", "Stats"]


class Stats(NamedTuple):
    """What a pipeline holds: documents, passages, and passages whose KV is in the store."""

    documents: int
    passages: int
    encoded: int


class Shelf:
    """What a pipeline does before a question comes.

    Attributes:
        blender: the model, and the store of chunk KV.
        settings: how documents are split and passages written.
    """

    blender: Blender
    settings: RagSettings
    _catalogue: Catalogue
    _finder: Finder
    _intake: Intake

    def add(
        self, documents: Iterable[Document | str], *, encode: Encode = "background", progress: bool = False
    ) -> Changes:
        """Splits, embeds and indexes documents, and encodes their passages.

        A document that is there already is not done again; what of it is not encoded yet, is. After an interruption
        a second call does the rest only.

        Args:
            documents: with ids of their own; texts alone are known by their digest.
            encode: ``background`` while no question is under way (:meth:`drain` waits for it), ``now``, or ``never``:
                the first question that needs a passage encodes it.
            progress: show bars.

        Raises:
            DocumentExists: an id that is there with another text, or given twice with two; nothing is changed then.
            SettingError: something that is no document.
        """
        return self._changed(self._intake.take(documents, "refuse", encode, progress))

    def update(
        self, documents: Iterable[Document | str], *, encode: Encode = "background", progress: bool = False
    ) -> Changes:
        """Puts documents in the place of those of the same ids; passages that both have stay as they are.

        The KV of passages that no document has any more is removed.

        Raises:
            UnknownDocument: an id that is not there; nothing is changed then.
        """
        return self._changed(self._intake.take(self._intake.require(documents), "replace", encode, progress))

    def sync(
        self,
        documents: Iterable[Document | str],
        *,
        prune: bool = False,
        encode: Encode = "background",
        progress: bool = False,
    ) -> Changes:
        """Adds what is new and updates what has changed.

        Args:
            prune: remove all other documents.
        """
        wanted = distinct(documents)
        changes = self._intake.take(wanted, "replace", encode, progress)
        if prune:
            keep = {document.id for document in wanted}
            gone = self._intake.remove(entry.id for entry in self.documents() if entry.id not in keep)
            changes = changes._replace(removed=gone.removed, dropped=changes.dropped + gone.dropped)
        return self._changed(changes)

    def remove(self, names: Iterable[str]) -> Changes:
        """Takes documents out by id, with the passages that no other document has, and their KV.

        Raises:
            UnknownDocument: an id that is not there; nothing is changed then.
        """
        return self._changed(self._intake.remove(names))

    def encode(self, *, progress: bool = False) -> int:
        """Encodes all passages that have no KV yet; returns how many those were."""
        return self._intake.encode(sorted(self._catalogue.numbers()), "now", progress)["encoded"]

    def drain(self, *, progress: bool = False) -> None:
        """Returns when everything that is to be encoded in the background is encoded."""
        self.blender.drain(progress=progress)

    def documents(self) -> list[Entry]:
        """The documents, by id."""
        return list(self._catalogue.documents())

    def __len__(self) -> int:
        """Passages."""
        return len(self._catalogue)

    def stats(self) -> Stats:
        """What the pipeline holds now; every passage is looked up in the store."""
        chunks = [Chunk(ids) for ids in self._catalogue.ids(sorted(self._catalogue.numbers())).values()]
        missing = len(self.blender.missing(chunks, system=self.settings.system))
        return Stats(len(self.documents()), len(self), len(set(chunks)) - missing)

    def _changed(self, changes: Changes) -> Changes:
        """Puts the indexes beside the catalogue where they are kept on disk."""
        self._finder.save()
        return changes
