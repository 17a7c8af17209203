"""SAMSum: chats summed up in a sentence or two, behind demonstrations of the same; each demonstration is a context.

Gliwa, Mochol, Biesek and Wawer, "SAMSum Corpus: A Human-annotated Dialogue Dataset for Abstractive Summarization",
2019, arXiv:1911.12237. Dialogues with summaries as reusable chunks: Yao et al., "CacheBlend", EuroSys 2025,
arXiv:2405.16444.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from eval.tasks.base import HubSet, Row, unique
from eval.vocabulary import Context, Example, Task

__all__ = ["HUB", "TASK"]

TASK = Task(
    name="samsum",
    title="SAMSum",
    system="Below are dialogues with their summaries. Summarize the last dialogue in the same way.",
    ask="Dialogue:\n{question}\nSummary:",
    tokens=64,
    metrics=("rouge_l", "f1"),
)

SHOTS = 8
"""Demonstrations of an example."""

POOL = 32
"""Different demonstrations in all: chunks come back, in ever new company."""


def convert(row: Row) -> Example:
    """A record: ``id``, ``dialogue``, ``summary``. Its demonstrations come from the others."""
    dialogue = (row["dialogue"] or "").replace("\r\n", "\n")
    return Example(str(row["id"]), dialogue, unique([row["summary"] or ""]), (), {"type": "summary"})


def demonstrate(examples: Sequence[Example], pool: Sequence[Example], seed: int) -> list[Example]:
    """Gives each example demonstrations drawn by seed and id, whole ones; never its own dialogue."""
    whole = [shot for shot in pool if shot.question.strip() and shot.answers]
    shown = random.Random(seed).sample(whole, min(POOL, len(whole)))
    return [
        replace(e, contexts=_drawn([s for s in shown if s.question != e.question], f"{seed} {e.id}")) for e in examples
    ]


def _drawn(shown: Sequence[Example], key: str) -> tuple[Context, ...]:
    chosen = random.Random(key).sample(shown, min(SHOTS, len(shown)))
    return tuple(Context(f"Dialogue:\n{shot.question}\nSummary: {shot.answers[0]}") for shot in chosen)


HUB = HubSet("knkarthick/samsum", "test", convert, shots="train", fill=demonstrate)
