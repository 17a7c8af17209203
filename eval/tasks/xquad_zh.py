"""XQuAD in Chinese: 1,190 questions of SQuAD and their paragraphs, translated by professionals.

Artetxe, Ruder and Yogatama, "On the Cross-lingual Transferability of Monolingual Representations", ACL 2020,
arXiv:1910.11856.
"""

from __future__ import annotations

from eval.tasks.base import HubSet, crowd, span_example
from eval.vocabulary import Task

__all__ = ["HUB", "TASK"]

TASK = Task(
    name="xquad_zh",
    title="XQuAD (Chinese)",
    system="请根据下面的段落回答问题。只用几个字回答。",
    ask="问题：{question}",
    tokens=32,  # a character takes a token or more where a vocabulary holds few of them
    metrics=("f1", "em", "rouge_l", "held"),
)

HUB = HubSet("google/xquad", "validation", span_example, config="xquad.zh", fill=crowd(8))
