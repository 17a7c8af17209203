"""Multi-News: one summary of several articles about the same event; each article is a context.

Fabbri, Li, She, Li and Radev, "Multi-News: A Large-Scale Multi-Document Summarization Dataset and Abstractive
Hierarchical Model", ACL 2019, arXiv:1906.01749.
"""

from __future__ import annotations

from eval.tasks.base import HubSet, Row, passages, unique
from eval.vocabulary import Example, Task

__all__ = ["HUB", "TASK"]

TASK = Task(
    name="multinews",
    title="Multi-News",
    system="Below are news articles about one event. Sum them up in a few sentences.",
    ask="{question}",
    tokens=64,
    metrics=("rouge_l", "f1"),
)

QUESTION = "Write a summary of all the articles."
"""The set asks none: every example wants the same."""


def convert(row: Row) -> Example:
    """A record: ``document`` with ``|||||`` between articles, and ``summary``."""
    articles = row["document"].replace("NEWLINE_CHAR", "\n").split("|||||")
    summary = row["summary"].strip().lstrip("–")  # each begins with a dash
    return Example(
        "", QUESTION, unique([summary]), passages(("", text, None) for text in articles), {"type": "summary"}
    )


# The set's main branch is a script, which today's `datasets` refuses; the hub keeps its rows on this one.
HUB = HubSet("alexfabbri/multi_news", "test", convert, revision="refs/convert/parquet")
