"""A report as Markdown, for GitHub and terminals. Knows nothing of evaluations."""

from __future__ import annotations

import re
from collections.abc import Iterable

from eval.report.blocks import Document, Notes, Picture, Section, Table, Text

__all__ = ["escape", "table", "write_markdown"]

_SPECIAL = re.compile(r"([\\`*_\[\]|~$#])")


def escape(text: str) -> str:
    """Text that Markdown shows as it is: on one line, with no markup, cell border, formula or HTML of its own."""
    flat = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(r"\\\1", flat)


def write_markdown(document: Document) -> str:
    """The whole document; pictures are links into ``plots/``."""
    parts = [f"# {escape(document.title)}", *(_section(section) for section in document.sections)]
    return "\n\n".join(parts) + "\n"


def table(block: Table) -> str:
    """A GitHub table."""
    heads = _line(column.head for column in block.columns)
    rule = "|" + "|".join("---:" if column.number else "---" for column in block.columns) + "|"
    return "\n".join([heads, rule, *(_line(cell.text for cell in row) for row in block.rows)])


def _section(section: Section) -> str:
    return "\n\n".join([f"## {escape(section.title)}", *(_block(block) for block in section.blocks)])


def _block(block: Text | Notes | Table | Picture) -> str:
    if isinstance(block, Table):
        return table(block)
    if isinstance(block, Text):
        return f"> **{escape(block.text)}**" if block.alert else escape(block.text)
    if isinstance(block, Notes):
        return "\n".join(
            f"- **{escape(term)}**: {escape(note)}" if term else f"- {escape(note)}" for term, note in block.items
        )
    return f"### {escape(block.title)}\n\n![{escape(block.title)}](plots/{block.name}.png)\n\n{escape(block.caption)}"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(escape(cell) for cell in cells) + " |"
