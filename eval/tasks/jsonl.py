"""Sets in JSONL files: an example a line, nothing skipped.

::

    {"id": "q1", "question": "...", "answers": ["..."], "contexts": [{"title": "...", "text": "...", "is_gold": true}],
     "task": "qa", "meta": {...}}

``title`` and ``is_gold`` may be missing or null, and so may ``task`` and ``meta``. Further keys are kept as ``meta``.
Blank lines hold nothing and count as none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from eval.tasks.base import DataError
from eval.vocabulary import Context, Example

__all__ = ["Line", "read_lines"]

_NEEDED: dict[str, type | tuple[type, ...]] = {"id": (str, int), "question": str, "answers": list, "contexts": list}
_OTHERS = ("task", "meta")


class Line(NamedTuple):
    """A line of a file.

    Attributes:
        place: file and number, for messages.
        task: what the line says; empty if nothing.
        example: on it.
    """

    place: str
    task: str
    example: Example


def read_lines(path: Path) -> Iterator[Line]:
    """All examples of a file.

    Raises:
        DataError: the file cannot be read, or a line of it is not of the form above; names file and line.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, start=1):
                if text.strip():
                    yield _line(text, f"{path}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _line(text: str, place: str) -> Line:
    try:
        row = json.loads(text)
    except ValueError as error:
        raise DataError(f"{place} is no JSON ({error}): it has to be one object") from error
    if not isinstance(row, dict):
        raise DataError(f"{place} is no object, but {text.strip()[:40]!r}: it has to be one example")
    for key, kind in _NEEDED.items():
        if not isinstance(row.get(key), kind) or isinstance(row.get(key), bool):
            said = f"is {row[key]!r}" if key in row else "is missing"
            raise DataError(f"{place}: {key!r} {said:.80}: an example has {', '.join(_NEEDED)}")
    if not all(isinstance(answer, str) for answer in row["answers"]):
        raise DataError(f"{place}: 'answers' are {row['answers']!r:.80}: they have to be texts")
    return Line(place, str(row.get("task") or ""), _example(row, place))


def _example(row: Mapping[str, Any], place: str) -> Example:
    more = {key: value for key, value in row.items() if key not in _NEEDED and key not in _OTHERS}
    return Example(
        id=str(row["id"]),
        question=row["question"],
        answers=tuple(row["answers"]),
        contexts=tuple(_context(c, f"{place}, context {i}") for i, c in enumerate(row["contexts"], start=1)),
        meta={**(row.get("meta") or {}), **more},
    )


def _context(row: Any, place: str) -> Context:
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise DataError(f"{place} is {row!r:.80}: it has to be an object with a 'text'")
    title, gold = row.get("title") or "", row.get("is_gold")
    if not isinstance(title, str) or not (gold is None or isinstance(gold, bool)):
        raise DataError(
            f"{place}: its 'title' is {title!r:.40} and 'is_gold' {gold!r:.40}: a text, and true, false or null"
        )
    return Context(row["text"], title, gold)
