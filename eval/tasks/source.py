"""What a set is called on the command line: a name, and options behind it. Knows no sets.

``needle:multi_key?contexts=16&n=20`` is the name ``needle:multi_key`` with the options ``contexts`` and ``n``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple
from urllib.parse import parse_qsl

from eval.tasks.base import DataError

__all__ = ["Source", "whole_numbers"]


class Source(NamedTuple):
    """A name and its options."""

    name: str
    options: Mapping[str, str]

    @classmethod
    def of(cls, data: str) -> Source:
        """Takes a name apart. Raises ``DataError`` for options that are no ``key=value``, or one twice."""
        name, _, query = data.partition("?")
        try:
            pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
        except ValueError as error:
            raise DataError(f"{data}: options are key=value with & between them, not {query!r}") from error
        if len({key for key, _ in pairs}) < len(pairs):
            raise DataError(f"{data}: an option is given twice")
        return cls(name, dict(pairs))

    def allow(self, known: Collection[str]) -> None:
        """Raises ``DataError`` for an option that is not known here."""
        if strange := [key for key in self.options if key not in known]:
            options = f"its options are {', '.join(known)}" if known else "it has no options"
            raise DataError(f"{self.name} has no option {strange[0]!r}: {options}")


def whole_numbers(source: Source, known: Collection[str]) -> dict[str, int]:
    """The options as whole numbers. Raises ``DataError`` for one that is none, or not known."""
    source.allow(known)
    try:
        return {key: int(value) for key, value in source.options.items()}
    except ValueError as error:
        raise DataError(f"{source.name}: options {', '.join(known)} are whole numbers, not {source.options}") from error
