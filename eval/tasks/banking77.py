"""BANKING77: a bank's customers' queries, to be labelled with one of 77 intents after examples of ten of them.

Casanueva, Temcinas, Gerz, Henderson and Vulic, "Efficient Intent Detection with Dual Sentence Encoders", NLP4ConvAI
2020, arXiv:2003.04807.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from eval.tasks.base import HubSet, Row, shuffled, unique
from eval.vocabulary import Context, Example, Task

__all__ = ["HUB", "TASK"]

TASK = Task(
    name="banking77",
    title="BANKING77",
    system="Below are queries of bank customers with their intents. Give the intent of the last query.",
    ask="Query: {question}\nWhich intent is it? Answer with the intent only.",
    tokens=18,  # the longest labels take 17 tokens of SmolLM2
    metrics=("label", "f1", "em", "held"),
)

INTENTS = 10
"""Intents shown with an example: its own and others, one context each."""

SHOTS = 8
"""Queries shown of an intent; the same ones each time, so there are no more than 77 different contexts."""


def convert(row: Row) -> Example:
    """A record: ``text``, ``label_text``."""
    label = row["label_text"]
    return Example("", row["text"], unique([label, label.replace("_", " ")]), (), {"type": label})


def demonstrate(examples: Sequence[Example], pool: Sequence[Example], seed: int) -> list[Example]:
    """Gives each example the queries of its own intent and of others drawn by seed and id, never its own query.

    An intent without any other query is not shown.
    """
    queries: dict[str, list[str]] = {}
    for shot in random.Random(seed).sample(pool, len(pool)):
        queries.setdefault(shot.answers[0], []).append(shot.question)
    return [replace(e, contexts=_shown(e, queries, f"{seed} {e.id}")) for e in examples]


def _shown(example: Example, queries: Mapping[str, Sequence[str]], key: str) -> tuple[Context, ...]:
    gold = example.answers[0]
    others = sorted(set(queries) - {gold})
    labels = [gold, *random.Random(key).sample(others, min(INTENTS - 1, len(others)))]
    found = ((label, [q for q in queries.get(label, ()) if q != example.question][:SHOTS]) for label in labels)
    return shuffled((_context(label, asked, label == gold) for label, asked in found if asked), key)


def _context(label: str, queries: Sequence[str], gold: bool) -> Context:
    return Context("\n".join(f"Query: {query}\nIntent: {label}" for query in queries), gold=gold)


HUB = HubSet("mteb/banking77", "test", convert, shots="train", fill=demonstrate)
