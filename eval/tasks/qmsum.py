"""QMSum: queries about a meeting, answered in a few sentences; each context is a part of the transcript.

Zhong et al., "QMSum: A New Benchmark for Query-based Multi-domain Meeting Summarization", NAACL 2021, arXiv:2104.05938.
On the hub it is a subset of LongBench: ``hub:longbench_summary?config=qmsum``.
"""

from __future__ import annotations

from eval.vocabulary import Task

__all__ = ["TASK"]

TASK = Task(
    name="qmsum",
    title="QMSum",
    system="Below are parts of the transcript of a meeting. Answer the query about it in one or two sentences.",
    ask="Query: {question}",
    tokens=64,
    metrics=("rouge_l", "f1"),
)
