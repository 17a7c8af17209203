"""The bundled demo set: questions about an invented world, whose answers no model can know by heart.

Options: ``demo?contexts=6`` (the gold passages and others drawn by the seed).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from eval.demo import DemoQuestion, Passage, load_passages, load_questions
from eval.tasks.base import DataError, shuffled
from eval.vocabulary import Context, Example, Task

__all__ = ["TASK", "make"]

TASK = Task(
    name="demo",
    title="Demo",
    system="Answer the question from the passages below. Answer in a few words.",
    ask="Question: {question}",
    tokens=24,
    metrics=("f1", "em", "rouge_l", "held"),
)


def make(seed: int, *, contexts: int = 6) -> list[Example]:
    """All questions, in their order, each over its gold passages and others, shuffled.

    Args:
        seed: with a question's id, of the choice and the order.
        contexts: passages of a question.

    Raises:
        DataError: fewer than a question needs, or more than there are.
    """
    corpus, questions = load_passages(), load_questions()
    most = max(len(question.gold) for question in questions)
    if not most <= contexts <= len(corpus):
        raise DataError(
            f"demo?contexts={contexts}: give {most} to {len(corpus)}, for the gold passages and all there are"
        )
    return [_example(question, corpus, contexts, f"{seed} {question.id}") for question in questions]


def _example(asked: DemoQuestion, corpus: Sequence[Passage], contexts: int, key: str) -> Example:
    others = [passage for passage in corpus if passage.id not in asked.gold]
    drawn = {passage.id for passage in random.Random(key).sample(others, contexts - len(asked.gold))}
    found = (Context(p.text, p.title, p.id in asked.gold) for p in corpus if p.id in drawn or p.id in asked.gold)
    return Example(asked.id, asked.question, asked.answers, shuffled(found, key), {"hops": asked.hops})
