"""Questions with the passages they are asked over: found by dense retrieval, in an order shuffled per question.

Knows no models but the embedder.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from blend import Blender, BudgetError, Prompt
from eval.demo import DemoQuestion, Passage
from retrieval import DenseIndex

__all__ = ["DemoCase", "make_cases"]


@dataclass(frozen=True)
class DemoCase:
    """One question over its passages, in prompt order."""

    question: DemoQuestion
    passages: tuple[Passage, ...]

    @property
    def recall(self) -> float:
        """Share of the question's gold passages that were found."""
        found = {passage.id for passage in self.passages}
        return sum(gold in found for gold in self.question.gold) / len(self.question.gold)

    def prompt(self, blender: Blender) -> Prompt:
        """The case as a prompt of ``blender``."""
        chunks = [blender.chunk(passage.text, passage.title) for passage in self.passages]
        return blender.prompt(self.question.question, chunks)


def make_cases(
    index: DenseIndex, passages: Sequence[Passage], questions: Sequence[DemoQuestion], *, k: int, seed: int
) -> Iterator[DemoCase]:
    """Picks ``k`` passages per question, whatever the gold ones are, and shuffles them.

    Args:
        index: holds the passages' texts, in the order of ``passages``.
        seed: with the question's id, of the shuffle.

    Raises:
        BudgetError: ``k`` is below 1 or above the number of passages.
    """
    if not 1 <= k <= len(passages):
        raise BudgetError(f"k is {k}: it must lie between 1 and {len(passages)}, the number of passages")
    for question in questions:
        found = [passages[hit.number] for hit in index.search(question.question, k)]
        random.Random(f"{seed} {question.id}").shuffle(found)
        yield DemoCase(question, tuple(found))
