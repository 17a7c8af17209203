"""HTML pages, as the Markdown of their main content. What is navigation and what is content, trafilatura decides."""

from __future__ import annotations

import re

from ..document import Document, Kind
from ..errors import ExtraMissing, UnreadableDocument
from .plain import decode, decode_as
from .quiet import quiet

__all__ = ["read_html"]

_CHARSET = re.compile(rb"""<meta[^>]{1,200}charset\s*=\s*["']?([\w.:-]+)""", re.IGNORECASE)
_PAGE = re.compile(r"<html[\s>]", re.IGNORECASE)


def read_html(data: bytes, name: str) -> list[Document]:
    """A page as one document: its main content as Markdown, or all its text where no main content is found.

    Raises:
        ExtraMissing: without trafilatura.
        UnreadableDocument: no text.
    """
    page = _text(data, name)
    if not _PAGE.search(page):
        page = f"<html><body>{page}</body></html>"  # trafilatura takes a fragment for no page at all
    try:
        import trafilatura
    except ImportError as missing:
        raise ExtraMissing(f'reading HTML needs trafilatura ({missing}): pip install "kvblend[docs]"') from missing
    with quiet("trafilatura", "htmldate", "courlan"):
        about = trafilatura.extract_metadata(page)
        # Rather a footer too many than a heading lost.
        text = trafilatura.extract(page, output_format="markdown", include_comments=False, favor_recall=True)
        kind: Kind = "markdown" if text else "text"
        text = text or trafilatura.html2txt(page)
    if not text.strip():
        raise UnreadableDocument(
            f"{name}: a page without text, maybe filled in by scripts: save it from a browser once it is shown"
        )
    metadata = {key: value for key in ("author", "url") if (value := getattr(about, key, None))}
    return [Document(text, title=getattr(about, "title", None) or "", source=name, kind=kind, metadata=metadata)]


def _text(data: bytes, name: str) -> str:
    """The page in the encoding it names, or else the likeliest."""
    named = _CHARSET.search(data, 0, 4096)
    text = decode_as(data, named[1].decode()) if named else None
    return decode(data, name).text if text is None or "\0" in text else text
