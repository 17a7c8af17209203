"""What every index of passages does. Knows numbers and texts; what a passage is, it does not know."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import ClassVar, NamedTuple

from retrieval.errors import SettingError

__all__ = ["Index", "Match", "at_least_one", "best_first", "numbers_for"]

HIGHEST = 2**63 - 1
"""The highest number: numbers are kept in 64 bits."""


class Match(NamedTuple):
    """A found text: its number, and how well it matches (higher is better)."""

    number: int
    score: float


class Index(ABC):
    """Numbered texts by how well they match a query. Several threads may search it, also while one changes it.

    Attributes:
        name: for settings and reports.
    """

    name: ClassVar[str]

    @abstractmethod
    def __len__(self) -> int:
        """Texts in the index."""

    @abstractmethod
    def numbers(self) -> Collection[int]:
        """The numbers of all texts in the index, as they are now."""

    @abstractmethod
    def add(self, texts: Sequence[str], numbers: Sequence[int] | None = None) -> None:
        """Adds texts; one whose number is there already takes the other's place.

        Args:
            numbers: one per text, 0 or more; counted on from the highest if not given.

        Raises:
            SettingError: as many numbers as texts are needed, each once.
        """

    @abstractmethod
    def remove(self, numbers: Collection[int]) -> int:
        """Takes texts out; returns how many of them were there."""

    @abstractmethod
    def search(self, query: str, k: int) -> list[Match]:
        """The ``k`` best matches, best first, and the lower number first where two match alike; fewer if fewer match.

        Raises:
            SettingError: ``k`` below 1.
        """

    @abstractmethod
    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the index into a folder, in place of the one that may be there: whole or not at all.

        Raises:
            DamagedIndex: the folder cannot be written to.
        """


def at_least_one(k: int) -> None:
    """Raises :class:`SettingError` for a ``k`` below 1."""
    if k < 1:
        raise SettingError(f"k is {k}: ask for at least 1 text")


def numbers_for(count: int, numbers: Sequence[int] | None, known: Collection[int]) -> list[int]:
    """The numbers of ``count`` texts to be added: those given, checked, or the next ones behind ``known``.

    Raises:
        SettingError: too few, too many, out of range, or one twice.
    """
    if numbers is None:
        first = max(known, default=-1) + 1
        return list(range(first, first + count))
    checked = [int(number) for number in numbers]
    if len(checked) != count:
        raise SettingError(f"{len(checked)} numbers for {count} texts: give one each, or none to have them counted on")
    if len(set(checked)) != count:
        twice = next(number for i, number in enumerate(checked) if number in checked[:i])
        raise SettingError(f"number {twice} is given twice: every text needs a number of its own")
    if wrong := [number for number in checked if not 0 <= number <= HIGHEST]:
        raise SettingError(f"number {wrong[0]} is out of range: a text's number is 0 to {HIGHEST}")
    return checked


def best_first(matches: Collection[Match]) -> list[Match]:
    """Sorted by score, best first; of equal scores the lower number first."""
    return sorted(matches, key=lambda match: (-match.score, match.number))
