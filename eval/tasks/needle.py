"""Needles: short facts about made-up things, hidden among sentences that say nothing; all of it generated from a seed.

Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?", COLM 2024, arXiv:2404.06654.
The four kinds are RULER's; the words, the filler and the sizes are our own. A needle stands in a context of its own,
between sentences, and gold contexts are those with a needle that is asked for.

=============== ============================================= =================================
kind            hidden                                        asked for
=============== ============================================= =================================
``single``      one number of one thing                       it
``multi_key``   a number each of several things               that of one
``multi_value`` several numbers of one thing                  all
``multi_query`` a number each of several things               all
=============== ============================================= =================================

Options: ``needle:multi_value?contexts=8&words=60&needles=4&n=40``, which are the defaults; ``needle`` alone is
``needle:single``, which hides one needle.
"""

from __future__ import annotations

import random
from typing import Literal, NamedTuple, get_args

from eval.tasks.base import DataError
from eval.vocabulary import Context, Example, Task

__all__ = ["TASK", "Kind", "make"]

TASK = Task(
    name="needle",
    title="Needles",
    system="Some special numbers are hidden in the passages below. Answer with the numbers that are asked for.",
    ask="Question: {question}",
    tokens=40,
    # Several numbers may be given in any order: of these, only F1 does not mind.
    metrics=("f1", "held", "em", "rouge_l"),
)

Kind = Literal["single", "multi_key", "multi_value", "multi_query"]

_HUES = ("amber", "crimson", "emerald", "golden", "indigo", "ivory", "jade", "scarlet", "silver", "violet")
_THINGS = ("anchor", "beacon", "compass", "falcon", "goblet", "lantern", "mirror", "otter", "pendulum", "sundial")

_WHO = ("The baker", "The clerk", "The farmer", "The guard", "The nurse", "The pilot", "The tailor", "The teacher")
_WHAT = ("carried a basket", "closed the window", "fed the pigeons", "mended a coat", "read a letter", "sang a song")
_WHERE = ("at the station", "behind the mill", "beside the river", "near the market", "under the bridge", "up the hill")
_WHEN = ("after dinner", "at noon", "before sunrise", "in the rain", "last winter", "that evening")


class Needle(NamedTuple):
    """A number of a thing."""

    key: str
    value: str

    @property
    def text(self) -> str:
        return f"One of the special numbers of the {self.key} is {self.value}."


def make(
    seed: int, kind: str = "single", *, contexts: int = 8, words: int = 60, needles: int = 4, n: int = 40
) -> list[Example]:
    """Examples of one kind; the same for the same arguments, everywhere.

    Args:
        seed: of everything.
        kind: one of :data:`Kind`.
        contexts: passages of an example.
        words: of filler in each, at least; a sentence is not cut.
        needles: hidden in an example; ``single`` hides one.
        n: examples.

    Raises:
        DataError: an unknown kind, or sizes that do not go together.
    """
    if kind not in get_args(Kind):
        raise DataError(f"there are no needles {kind!r}: choose from {', '.join(get_args(Kind))}")
    needles = 1 if kind == "single" else needles
    most = min(contexts, len(_HUES) * len(_THINGS))
    if not 1 <= needles <= most:
        raise DataError(
            f"needles={needles} and contexts={contexts}: each needle has a context of its own, give 1 to {most}"
        )
    if words < 1 or n < 1:
        raise DataError(f"words={words} and n={n}: both are 1 or more")
    return [_example(f"{kind}-{seed}-{i}", kind, contexts, words, needles) for i in range(n)]


def _example(name: str, kind: str, contexts: int, words: int, needles: int) -> Example:
    rng = random.Random(f"{name} {contexts} {words} {needles}")
    hidden = _needles(rng, kind, needles)
    asked = hidden[:1] if kind == "multi_key" else hidden
    places = dict(zip(rng.sample(range(contexts), needles), hidden, strict=True))
    found = tuple(_context(rng, words, places.get(i), asked) for i in range(contexts))
    in_order = [places[i].value for i in sorted(places) if places[i] in asked]
    values = in_order if kind == "multi_value" else [needle.value for needle in asked]
    return Example(name, _question(asked), (", ".join(values),), found, {"type": kind})


def _needles(rng: random.Random, kind: str, count: int) -> list[Needle]:
    keys = rng.sample([f"{hue} {thing}" for hue in _HUES for thing in _THINGS], count)
    values = rng.sample(range(10_000, 100_000), count)
    return [Needle(keys[0] if kind == "multi_value" else key, str(v)) for key, v in zip(keys, values, strict=True)]


def _question(asked: list[Needle]) -> str:
    keys = list(dict.fromkeys(f"the {needle.key}" for needle in asked))
    every = ", ".join(keys[:-1]) + f" and {keys[-1]}" if len(keys) > 1 else keys[0]
    return (
        f"What are all the special numbers of {every}?" if len(asked) > 1 else f"What is the special number of {every}?"
    )


def _context(rng: random.Random, words: int, needle: Needle | None, asked: list[Needle]) -> Context:
    sentences: list[str] = []
    while sum(len(sentence.split()) for sentence in sentences) < words:
        sentences.append(f"{rng.choice(_WHO)} {rng.choice(_WHAT)} {rng.choice(_WHERE)} {rng.choice(_WHEN)}.")
    if needle is not None:
        sentences.insert(rng.randint(0, len(sentences)), needle.text)
    return Context(" ".join(sentences), gold=needle in asked)
