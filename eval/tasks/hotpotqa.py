"""HotpotQA, distractor setting: two-hop questions over ten paragraphs.

Yang et al., "HotpotQA: A Dataset for Diverse, Explainable Multi-hop Question Answering", EMNLP 2018, arXiv:1809.09600.
"""

from __future__ import annotations

from eval.tasks.base import HubSet, Row, passages, unique
from eval.vocabulary import Example, Task

__all__ = ["HUB", "TASK", "convert"]

TASK = Task(
    name="hotpotqa",
    title="HotpotQA",
    system="Answer the question from the passages below. It takes two of them. Answer in a few words.",
    ask="Question: {question}",
    tokens=24,
    metrics=("f1", "em", "rouge_l", "held"),
)


def convert(row: Row) -> Example:
    """A record: ``id``, ``question``, ``answer``, ``type``, and ``context`` and ``supporting_facts`` as lists."""
    gold, context = set(row["supporting_facts"]["title"]), row["context"]
    found = zip(context["title"], context["sentences"], strict=True)
    return Example(
        id=str(row["id"]),
        question=row["question"],
        answers=unique([row["answer"]]),
        # Some sentences carry their own leading space, some do not; one is enough.
        contexts=passages((title, " ".join(s.strip() for s in sentences), title in gold) for title, sentences in found),
        meta={"type": row["type"]},
    )


HUB = HubSet("hotpotqa/hotpot_qa", "validation", convert, config="distractor")
