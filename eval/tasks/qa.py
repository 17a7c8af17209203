"""Question answering over passages: the task of a set of one's own that no task here is named after."""

from __future__ import annotations

from eval.vocabulary import Task

__all__ = ["TASK"]

TASK = Task(
    name="qa",
    title="Question answering",
    system="Answer the question from the passages below. Answer in a few words.",
    ask="Question: {question}",
    tokens=24,
    metrics=("f1", "em", "rouge_l", "held"),
)
