"""What every index of passages does. Knows numbers and texts; what a passage is, it does not know."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import ClassVar, NamedTuple

from retrieval.errors import SettingError

__all__ = ["Index", "Match", "at_least_one"]


class Match(NamedTuple):
    """A found text: its number, and how well it matches (higher is better)."""

    number: int
    score: float


class Index(ABC):
    """Numbered texts by how well they match a query. Safe to be searched by several threads; changed by one at a time.

    Attributes:
        name: for settings and reports.
    """

    name: ClassVar[str]

    @abstractmethod
    def __len__(self) -> int:
        """Texts in the index."""

    @abstractmethod
    def numbers(self) -> Collection[int]:
        """The numbers of all texts in the index."""

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
        """The ``k`` best matches, best first; fewer where fewer match.

        Raises:
            SettingError: ``k`` below 1.
        """

    @abstractmethod
    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the index into a folder, whole or not at all."""


def at_least_one(k: int) -> None:
    """Raises :class:`SettingError` for a ``k`` below 1."""
    if k < 1:
        raise SettingError(f"k is {k}: ask for at least 1 text")
