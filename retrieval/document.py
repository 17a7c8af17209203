"""The vocabulary of retrieval: documents, the passages they are split into, and hits. Knows no models, no indexes."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from retrieval.errors import UnreadableDocument

__all__ = ["Document", "Hit", "Kind", "Passage", "Piece"]

Kind = Literal["text", "markdown"]
"""How a text is built, for splitting: anywhere, or along its headings and blocks."""


@dataclass(frozen=True)
class Document:
    """A text to answer from.

    Attributes:
        text: all of it.
        id: names it; ``source`` if empty, and without that its digest.
        title: shown to the model with every passage, and in citations; may be empty.
        source: where it came from: a path or URL; may be empty.
        kind: how it is split.
        pages: where each page begins, as offsets into ``text``; empty for a text without pages.
        metadata: whatever else is known of it; plain data for JSON.

    Raises:
        UnreadableDocument: no text, or half a character (a lone surrogate) in it.
    """

    text: str
    id: str = ""
    title: str = ""
    source: str = ""
    kind: Kind = "text"
    pages: tuple[int, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise UnreadableDocument(f"document {self.id or self.source or self.title!r} has no text: leave it out")
        for part in (self.text, self.title, self.source, self.id):
            _require_unicode(part, self.id or self.source or self.title)
        if not self.id:
            object.__setattr__(self, "id", self.source or self.digest)

    @property
    def digest(self) -> str:
        """Digest of what its passages depend on: text, title and kind."""
        return hashlib.sha256("\0".join((self.kind, self.title, self.text)).encode()).hexdigest()[:32]

    def page(self, offset: int) -> int | None:
        """Number of the page, from 1, on which the character at ``offset`` stands; None without pages."""
        return max(bisect_right(self.pages, offset), 1) if self.pages else None


def _require_unicode(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnreadableDocument(
            f"document {name!r} holds half a character (a lone surrogate) at {error.start}: "
            'replace it with text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")'
        ) from error


class Piece(NamedTuple):
    """A part of a text: ``text[start:end]`` of the whole."""

    text: str
    start: int
    end: int


@dataclass(frozen=True)
class Passage:
    """A piece of a document, as an index knows it.

    Attributes:
        number: names it in its index.
        text: the piece.
        document: id of its document.
        title: of the document.
        source: of the document.
        start: offset of its first character in the document's text.
        end: offset behind its last.
        page: on which it begins, from 1; None without pages.
        metadata: of the document.
    """

    number: int
    text: str
    document: str
    title: str = ""
    source: str = ""
    start: int = 0
    end: int = 0
    page: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def citation(self) -> str:
        """Where to read it: ``pier.pdf, page 3, characters 120-480``."""
        page = f"page {self.page}, " if self.page is not None else ""
        return f"{self.source or self.title or self.document}, {page}characters {self.start}-{self.end}"


class Hit(NamedTuple):
    """A passage that was found, and its score in the last stage that ranked it; higher is better."""

    passage: Passage
    score: float
