"""MuSiQue: questions of two to four hops over twenty paragraphs.

Trivedi, Balasubramanian, Khot and Sabharwal, "MuSiQue: Multihop Questions via Single-hop Question Composition",
TACL 2022, arXiv:2108.00573.
"""

from __future__ import annotations

from eval.tasks.base import HubSet, Row, passages, unique
from eval.vocabulary import Example, Task

__all__ = ["HUB", "TASK"]

TASK = Task(
    name="musique",
    title="MuSiQue",
    system="Answer the question from the passages below. It takes several of them. Answer in a few words.",
    ask="Question: {question}",
    tokens=24,
    metrics=("f1", "em", "rouge_l", "held"),
)


def convert(row: Row) -> Example:
    """A record of MuSiQue-Ans: ``id``, ``question``, ``paragraphs``, ``answer``, ``answer_aliases``."""
    found = ((p["title"], p["paragraph_text"], bool(p["is_supporting"])) for p in row["paragraphs"])
    hops = str(row["id"]).split("__")[0]
    return Example(
        id=str(row["id"]),
        question=row["question"],
        answers=unique([row["answer"], *row["answer_aliases"]]),
        contexts=passages(found),
        meta={"type": hops},
    )


HUB = HubSet("dgslibisey/MuSiQue", "validation", convert)
