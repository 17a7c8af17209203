"""SQuAD: questions that one paragraph answers, among other paragraphs. Also the English half of XQuAD.

Rajpurkar, Zhang, Lopyrev and Liang, "SQuAD: 100,000+ Questions for Machine Comprehension of Text", EMNLP 2016,
arXiv:1606.05250; Artetxe, Ruder and Yogatama, "On the Cross-lingual Transferability of Monolingual Representations",
ACL 2020, arXiv:1910.11856 (XQuAD).
"""

from __future__ import annotations

from eval.tasks.base import HubSet, crowd, span_example
from eval.vocabulary import Task

__all__ = ["HUB", "TASK"]

TASK = Task(
    name="squad",
    title="SQuAD",
    system="Answer the question from the passages below. Answer in a few words.",
    ask="Question: {question}",
    tokens=24,
    metrics=("f1", "em", "rouge_l", "held"),
)

HUB = HubSet("rajpurkar/squad", "validation", span_example, fill=crowd(8))
