"""NQ-open: questions that people asked a search engine, over passages of about 100 words.

Kwiatkowski et al., "Natural Questions", TACL 2019; Lee, Chang and Toutanova, ACL 2019, arXiv:1906.00300 (open form);
Karpukhin et al., "Dense Passage Retrieval", EMNLP 2020, arXiv:2004.04906 (the passages of the hub set).
"""

from __future__ import annotations

from eval.tasks.base import HubSet, Row, passages, shuffled, unique
from eval.vocabulary import Example, Task

__all__ = ["HUB", "TASK", "convert"]

TASK = Task(
    name="nq_open",
    title="NQ-open",
    system="Answer the question from the passages below. Answer in a few words.",
    ask="Question: {question}",
    tokens=24,
    metrics=("f1", "em", "rouge_l", "held"),
)

CONTEXTS = 10
"""Passages of a question: its first positive one and the hardest negative ones, shuffled."""


def convert(row: Row) -> Example:
    """A record of Dense Passage Retrieval: ``query_id``, ``query``, ``answers``, positive and negative passages."""
    positive = [(p["title"], p["text"], True) for p in row["positive_passages"][:1]]
    negative = [(p["title"], p["text"], False) for p in row["negative_passages"]]
    found = passages([*positive, *negative])[:CONTEXTS]
    key = str(row["query_id"])
    return Example(key, row["query"], unique(row["answers"]), shuffled(found, key), {"type": "extractive"})


HUB = HubSet("Tevatron/wikipedia-nq", "dev", convert)
