"""What a task's file is made of beside its :class:`~eval.vocabulary.Task`: where its set is on the hub, and how a row
of it becomes an example. Knows no files and no library that reads them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from blend.errors import KVBlendError
from eval.vocabulary import Context, Example

__all__ = ["DataError", "Fill", "HubSet", "Row", "crowd", "passages", "shuffled", "span_example", "unique"]

Row = Mapping[str, Any]
"""A row of a set on the hub, by the names of its columns."""

Fill = Callable[[Sequence[Example], Sequence[Example], int], list[Example]]
"""Gives examples more contexts: of the examples, the examples to draw from, and a seed."""


class DataError(KVBlendError, ValueError):
    """A set that is not there or cannot be used as it is; the message names the place and what is expected in it."""


@dataclass(frozen=True)
class HubSet:
    """A set on the hub, or a local one of the same columns.

    Attributes:
        path: its name.
        split: the one that is asked.
        convert: a row as an example; its id is empty where rows have none, and it has no answers where a row has none.
        config: its configuration; None where there is but one.
        revision: branch, where it is not the main one.
        shots: the split that ``fill`` draws from; None for ``split`` itself.
        fill: gives contexts to examples that the set gives one or none; None where its own are enough.
    """

    path: str
    split: str
    convert: Callable[[Row], Example]
    config: str | None = None
    revision: str | None = None
    shots: str | None = None
    fill: Fill | None = None


def passages(found: Iterable[tuple[str, str, bool | None]]) -> tuple[Context, ...]:
    """Contexts from titles, texts and gold marks. One without any text is left out: there is nothing to encode."""
    return tuple(Context(text.strip(), title.strip(), gold) for title, text, gold in found if text.strip())


def unique(answers: Iterable[str]) -> tuple[str, ...]:
    """Answers without blanks around them, each once, in their order."""
    return tuple(dict.fromkeys(answer.strip() for answer in answers if answer.strip()))


def shuffled(contexts: Iterable[Context], key: str) -> tuple[Context, ...]:
    """The contexts in an order that depends on ``key`` alone, in every process."""
    order = list(contexts)
    random.Random(key).shuffle(order)
    return tuple(order)


def span_example(row: Row) -> Example:
    """A row of SQuAD's form: ``id``, ``question``, ``context``, ``answers`` with their ``text``, perhaps ``title``."""
    title = str(row.get("title") or "").replace("_", " ")
    gold = passages([(title, row["context"], True)])
    return Example(str(row["id"]), row["question"], unique(row["answers"]["text"]), gold, {"type": "extractive"})


def crowd(count: int) -> Fill:
    """Puts other examples' passages around those that an example has, in an order shuffled by seed and id.

    None of them holds an answer of the example, so that only its own passage answers it.

    Args:
        count: passages in all; fewer where the set holds no more.
    """

    def fill(examples: Sequence[Example], pool: Sequence[Example], seed: int) -> list[Example]:
        every = list(dict.fromkeys(replace(c, gold=False) for other in pool for c in other.contexts))
        return [_crowded(example, every, count, f"{seed} {example.id}") for example in examples]

    return fill


def _crowded(example: Example, every: Sequence[Context], count: int, key: str) -> Example:
    others = islice(_strangers(example, every, key), max(count - len(example.contexts), 0))
    return replace(example, contexts=shuffled((*example.contexts, *others), key))


def _strangers(example: Example, every: Sequence[Context], key: str) -> Iterator[Context]:
    """Passages without an answer of the example, none of them its own, in a seeded order."""
    own, answers = {context.text for context in example.contexts}, [answer.casefold() for answer in example.answers]
    for context in random.Random(key).sample(every, len(every)):
        if context.text not in own and not any(answer in context.text.casefold() for answer in answers):
            yield context
