"""What a report is made of, before it is Markdown or HTML: sections of texts, tables and pictures. Plain text only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["Cell", "Column", "Document", "Notes", "Picture", "Section", "Table", "Text"]


@dataclass(frozen=True)
class Text:
    """A paragraph. ``alert``: the reader must not miss it."""

    text: str
    alert: bool = False


@dataclass(frozen=True)
class Notes:
    """A list: each a term and what it means, or an empty term and a sentence."""

    items: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Column:
    """A table's column; ``number``: its cells stand to the right."""

    head: str
    number: bool = True


@dataclass(frozen=True)
class Cell:
    """A cell as it is read, and what it is sorted by (None: by its text, or last among numbers)."""

    text: str
    value: float | None = None


@dataclass(frozen=True)
class Table:
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Picture:
    """A picture: its file's stem in ``plots/``, and the SVG for the page."""

    name: str
    title: str
    caption: str
    svg: str = field(repr=False)


@dataclass(frozen=True)
class Section:
    """A heading with what stands under it. ``folded``: closed on the page until it is opened."""

    title: str
    blocks: tuple[Text | Notes | Table | Picture, ...]
    folded: bool = False


@dataclass(frozen=True)
class Document:
    title: str
    sections: tuple[Section, ...]

    def pictures(self) -> Iterator[Picture]:
        return (block for section in self.sections for block in section.blocks if isinstance(block, Picture))
