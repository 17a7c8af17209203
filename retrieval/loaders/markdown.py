"""Markdown files: the text stays Markdown, YAML front matter becomes metadata."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..document import Document
from ..errors import ExtraMissing, UnreadableDocument
from .plain import decode
from .rows import plain_data

__all__ = ["first_heading", "read_markdown"]

_FENCED = re.compile(r"^ {0,3}(```+|~~~+).*?(^ {0,3}\1|\Z)", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(
    r"^ {0,3}#{1,6}[ \t]+(?P<atx>.*?\S)[ \t]*(?:[ \t]#+[ \t]*)?$|^ {0,3}(?P<line>\S.*)\n {0,3}(?:=+|--+)[ \t]*$",
    re.MULTILINE,
)


def read_markdown(data: bytes, name: str) -> list[Document]:
    """A Markdown file as one document; its title is the front matter's, or else the first heading.

    Raises:
        ExtraMissing: without python-frontmatter.
        UnreadableDocument: no text.
    """
    metadata, text = _front_matter(decode(data, name).text)
    if not text.strip():
        raise UnreadableDocument(f"{name}: front matter and no text below it: leave it out")
    title = str(metadata.get("title") or first_heading(text))
    return [Document(text, title=title, source=name, kind="markdown", metadata=plain_data(metadata))]


def first_heading(text: str) -> str:
    """The first heading of a Markdown text, outside of code; empty without one."""
    match = _HEADING.search(_FENCED.sub("", text))
    return (match["atx"] or match["line"]).strip() if match else ""


def _front_matter(text: str) -> tuple[Mapping[str, Any], str]:
    try:
        import frontmatter
        from frontmatter.default_handlers import YAMLHandler
    except ImportError as missing:
        raise ExtraMissing('reading Markdown needs python-frontmatter: pip install "kvblend[docs]"') from missing
    try:
        metadata, body = frontmatter.parse(text, handler=YAMLHandler())
    except Exception:  # YAML's errors and those of dates in it: two rules with prose between them, part of the text
        return {}, text
    return (metadata, body) if metadata else ({}, text)
