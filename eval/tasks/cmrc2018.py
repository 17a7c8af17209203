"""CMRC 2018: Chinese questions that one paragraph answers, among other paragraphs.

Cui et al., "A Span-Extraction Dataset for Chinese Machine Reading Comprehension", EMNLP-IJCNLP 2019, arXiv:1810.07366.
"""

from __future__ import annotations

from eval.tasks.base import HubSet, crowd, span_example
from eval.vocabulary import Task

__all__ = ["HUB", "TASK"]

TASK = Task(
    name="cmrc2018",
    title="CMRC 2018",
    system="请根据下面的段落回答问题。只用几个字回答。",
    ask="问题：{question}",
    tokens=32,  # a character takes a token or more where a vocabulary holds few of them
    metrics=("f1", "em", "rouge_l", "held"),
)

HUB = HubSet("hfl/cmrc2018", "validation", span_example, fill=crowd(8))
