"""LongBench: questions and summaries over one long text, which is cut into passages here.

Bai et al., "LongBench: A Bilingual, Multitask Benchmark for Long Context Understanding", ACL 2024, arXiv:2308.14508.
The text is cut at its own marks, "Passage 3:" or "Dialogue:", or else into pieces at paragraphs and sentences. The mark
itself goes: with its number in it, a passage would be another chunk in every prompt.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from eval.tasks.base import DataError, HubSet, Row, passages, unique
from eval.vocabulary import Context, Example, Task
from retrieval import Splitter

__all__ = ["HUB", "HUB_SUMMARY", "SUMMARY", "TASK", "cut"]

TASK = Task(
    name="longbench",
    title="LongBench QA",
    system="Answer the question from the passages below. Answer in a few words.",
    ask="Question: {question}",
    tokens=24,
    metrics=("f1", "em", "rouge_l", "held"),
)

SUMMARY = Task(
    name="longbench_summary",
    title="LongBench summaries",
    system="Read the passages below, then do what is asked behind them, in a few sentences.",
    ask="{question}",
    tokens=64,
    metrics=("rouge_l", "f1"),
)

SUBSETS = ("2wikimqa", "hotpotqa", "multifieldqa_en", "musique", "narrativeqa", "qasper")
"""Subsets of ``longbench``."""

SUMMARIES = ("gov_report", "multi_news", "qmsum", "samsum")
"""Subsets of ``longbench_summary``. The other subsets test code, counting and Chinese, and have no task here."""

QUESTION = "Write a summary of all the passages."
"""Where a subset asks none."""

CHARACTERS = 1200
"""Of a piece of a text without marks, at most."""

_PASSAGE = re.compile(r"^Passage \d+:\n", re.MULTILINE)
_DIALOGUE = re.compile(r"^(?=Dialogue:)", re.MULTILINE)


def cut(text: str) -> tuple[Context, ...]:
    """A long text as passages, in its order."""
    parts = _PASSAGE.split(text)
    if len(parts) > 1:
        return passages(("", part, None) for part in parts)
    parts = _DIALOGUE.split(text)
    if len(parts) > 2:
        return passages(("", part, None) for part in parts)
    return passages(("", piece.text, None) for piece in Splitter(len, CHARACTERS, overlap=0).split(text))


def converter(task: str, subsets: tuple[str, ...]) -> Callable[[Row], Example]:
    """Of rows with ``_id``, ``input``, ``context``, ``answers``, ``dataset``, for the subsets of one task."""

    def convert(row: Row) -> Example:
        if row["dataset"] not in subsets:
            raise DataError(f"LongBench's {row['dataset']} is no subset of {task}, which knows {', '.join(subsets)}")
        question = row["input"].strip().removesuffix("Summary:").strip() or QUESTION
        return Example(str(row["_id"]), question, unique(row["answers"]), cut(row["context"]), {"type": row["dataset"]})

    return convert


HUB = HubSet("Xnhyacinth/LongBench", "test", converter(TASK.name, SUBSETS), config="hotpotqa")
HUB_SUMMARY = HubSet("Xnhyacinth/LongBench", "test", converter(SUMMARY.name, SUMMARIES), config="gov_report")
