"""TriviaQA: quiz questions, over passages of about 100 words of Wikipedia.

Joshi, Choi, Weld and Zettlemoyer, "TriviaQA: A Large Scale Distantly Supervised Challenge Dataset for Reading
Comprehension", ACL 2017, arXiv:1705.03551; passages as in Dense Passage Retrieval, arXiv:2004.04906.
"""

from __future__ import annotations

from eval.tasks.base import HubSet
from eval.tasks.nq_open import convert
from eval.vocabulary import Task

__all__ = ["HUB", "TASK"]

TASK = Task(
    name="triviaqa",
    title="TriviaQA",
    system="Answer the question from the passages below. Answer in a few words.",
    ask="Question: {question}",
    tokens=24,
    metrics=("f1", "em", "rouge_l", "held"),
)

HUB = HubSet("Tevatron/wikipedia-trivia", "dev", convert)
