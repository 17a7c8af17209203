"""The demo corpus: passages and questions of an invented world, whose answers no model can know by heart.

Reads the package's own data files; knows no models.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

__all__ = ["DemoQuestion", "Passage", "load_passages", "load_questions"]


@dataclass(frozen=True)
class Passage:
    """A short text about one thing of the invented world."""

    id: str
    title: str
    text: str


@dataclass(frozen=True)
class DemoQuestion:
    """A question over the passages.

    Attributes:
        id: its name.
        question: its text.
        answers: spellings of the right answer.
        gold: ids of the passages that hold the answer; a two-hop question needs them all.
        hops: passages to be joined.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    gold: tuple[str, ...]
    hops: int

    def answered_by(self, text: str) -> bool:
        """Whether ``text`` contains a right answer, in any case of letters."""
        return any(answer.lower() in text.lower() for answer in self.answers)


def load_passages() -> tuple[Passage, ...]:
    """All passages, in corpus order."""
    return tuple(Passage(**record) for record in _records("passages.jsonl"))


def load_questions() -> tuple[DemoQuestion, ...]:
    """All questions, single-hop ones first."""
    records = _records("questions.jsonl")
    return tuple(DemoQuestion(**{**r, "answers": tuple(r["answers"]), "gold": tuple(r["gold"])}) for r in records)


def _records(name: str) -> list[dict[str, Any]]:
    text = files(__name__).joinpath(name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines() if line]
