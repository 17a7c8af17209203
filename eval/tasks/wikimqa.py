"""2WikiMultihopQA: questions that join or compare Wikipedia articles, over ten paragraphs.

Ho, Duong Nguyen, Sugawara and Aizawa, "Constructing A Multi-hop QA Dataset for Comprehensive Evaluation of Reasoning
Steps", COLING 2020, arXiv:2011.01060.
"""

from __future__ import annotations

from eval.tasks.base import HubSet
from eval.tasks.hotpotqa import convert
from eval.vocabulary import Task

__all__ = ["HUB", "TASK"]

TASK = Task(
    name="2wikimqa",
    title="2WikiMultihopQA",
    system="Answer the question from the passages below. It takes several of them. Answer in a few words.",
    ask="Question: {question}",
    tokens=24,
    metrics=("f1", "em", "rouge_l", "held"),
)

HUB = HubSet("framolfese/2WikiMultihopQA", "validation", convert)  # its rows are of HotpotQA's form
