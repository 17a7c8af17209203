"""Rows with named fields to documents: JSON lines, rows of the datasets library, or any mappings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..document import Document
from ..errors import UnreadableDocument
from .plain import decode, tidy

__all__ = ["from_rows", "plain_data", "read_jsonl"]


def from_rows(
    rows: Iterable[Mapping[str, Any]],
    text: str = "text",
    id: str | None = None,  # noqa: A002 - the name of the field
    title: str | None = None,
    source: str | None = None,
) -> Iterator[Document]:
    """Documents of rows, one each, read as they are asked for.

    Args:
        rows: mappings, such as a ``datasets.Dataset``.
        text: name of the field that holds the text.
        id: name of the field that names a row; None, or a row without it, for a digest of its text.
        title: name of the field of its title; None for no titles.
        source: name of the field of its source; None for no sources.

    Fields without a name here become metadata.

    Raises:
        UnreadableDocument: a row without text, by its number from 0.
    """
    for number, row in enumerate(rows):
        yield _document(row, (text, id, title, source), f"row {number}")


def read_jsonl(
    data: bytes,
    name: str,
    *,
    text: str = "text",
    id: str = "id",  # noqa: A002
    title: str = "title",
    source: str = "source",
) -> list[Document]:
    """Documents of a JSON Lines file, one per line, with the fields of :func:`from_rows`.

    Without a source of its own a line has ``name:number``, from 1, and so it has for an id. Blank lines hold none.

    Raises:
        UnreadableDocument: a line that is no JSON object or has no text, by its number.
    """
    documents = []
    for number, line in enumerate(decode(data, name).text.split("\n"), 1):
        if line.strip():
            where = f"{name}, line {number}"
            documents.append(_document(_row(line, where), (text, id, title, source), where, f"{name}:{number}"))
    return documents


def plain_data(value: Any) -> Any:
    """A value as JSON can hold it; what it cannot, such as a date, as its text."""
    if isinstance(value, Mapping):
        return {str(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(item) for item in value]
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


def _row(line: str, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UnreadableDocument(f"{where}: no JSON ({error}): mend or delete the line") from error
    if not isinstance(row, dict):
        raise UnreadableDocument(f'{where}: a {type(row).__name__} and no object: write {{"text": ...}}')
    return row


def _document(
    row: Mapping[str, Any], fields: tuple[str, str | None, str | None, str | None], where: str, place: str = ""
) -> Document:
    text, *others = fields
    if text not in row:
        raise UnreadableDocument(
            f"{where}: no field {text!r} among {', '.join(map(repr, row)) or 'none'}: name it text="
        )
    if not isinstance(row[text], str) or not row[text].strip():
        raise UnreadableDocument(f"{where}: field {text!r} holds no text but {row[text]!r:.60}: leave the row out")
    name, title, source = ("" if key is None or row.get(key) is None else tidy(str(row[key])) for key in others)
    rest = {key: value for key, value in row.items() if key not in fields}
    return Document(tidy(row[text]), name or place, title, source or place, metadata=plain_data(rest))
